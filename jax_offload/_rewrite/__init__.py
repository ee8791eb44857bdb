"""A whole step: cut at its updates, and emitted from its parts."""
