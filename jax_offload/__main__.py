"""``python -m jax_offload``: the command ``jax-offload``."""

from jax_offload._analysis.cli import main

main()
