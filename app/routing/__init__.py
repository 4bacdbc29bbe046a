"""Routing: the model that serves a request, and degraded mode under load."""
