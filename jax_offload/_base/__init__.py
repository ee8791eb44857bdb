"""What knows jax: memory, shardings, paths, and all of its internals that are needed."""
