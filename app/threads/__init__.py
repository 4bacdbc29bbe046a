"""Threads for blocking work, and whose turn it is at them."""
