"""Make, read or convert a state."""
