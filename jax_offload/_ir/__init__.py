"""A traced update as a program, and the program in slices."""
