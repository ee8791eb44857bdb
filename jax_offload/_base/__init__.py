"""The modules that know jax: memory, shardings, paths, and all internals of jax that the package needs."""
