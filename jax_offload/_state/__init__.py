"""A state: which leaf lives where and divided how, in which format; made, read, moved, converted and saved."""
