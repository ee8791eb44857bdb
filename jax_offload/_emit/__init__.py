"""Turn a plan into equations of jax."""
