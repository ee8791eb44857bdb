"""An update as one equation, and its schedule as equations of jax."""
