"""The engine without a model, for tests and trials."""
