"""``placement``: a table read off a trace, and how it prints."""
