"""State in files: what is below jax. A store, its blocks, and sweeps over it."""
