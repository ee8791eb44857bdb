"""Name the packages that the examples need."""


def missing(error: ModuleNotFoundError) -> SystemExit:
    return SystemExit(
        f"{error.name} is not installed. The examples need jax_offload's extra 'examples' (flax, orbax, matplotlib, "
        "tqdm): pip install '.[examples]' in the repository's folder, or make demo, which sets up an environment."
    )
