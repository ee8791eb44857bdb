"""Which leaf of a state lives where, divided how, and who updates it."""
