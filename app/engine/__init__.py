"""Engines behind the protocol of app.core, and nothing of HTTP."""
