"""The model and the systems in JAX. Not ``jax``: a script in ``benchmarks`` would import that for jax itself."""
