"""What makes, reads or converts a state."""
