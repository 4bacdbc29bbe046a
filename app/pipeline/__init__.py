"""The way of one request: its stages, and its end."""
