"""``python -m jax_offload``: the command ``jax-offload``."""

from jax_offload._look.cli import main

main()
