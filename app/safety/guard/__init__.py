"""The guard model tier."""
