"""Estimates of the device memory that a traced program needs: by the lifetimes of its arrays."""
