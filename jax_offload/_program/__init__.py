"""A traced program: equations, slices, rows; memory, shardings, and everything that jax does not document."""
