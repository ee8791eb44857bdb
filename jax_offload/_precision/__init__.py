"""Fewer bits, and more: storage formats and master parameters."""
