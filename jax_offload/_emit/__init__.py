"""From a plan to equations of jax."""
