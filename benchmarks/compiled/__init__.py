"""Steps compiled for a chip that is not there."""
