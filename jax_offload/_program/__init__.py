"""A traced program: equations, slices, rows, what each needs; memory, shardings, and all that jax does not document."""
