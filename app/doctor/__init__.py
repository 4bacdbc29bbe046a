"""`tokenring doctor`: what a server needs of its machine and settings, checked without starting it."""
