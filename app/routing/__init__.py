"""Which model serves a request, and how much of it under load."""
