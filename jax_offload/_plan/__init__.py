"""What is loaded when, how, and through which window: decided, as a value."""
