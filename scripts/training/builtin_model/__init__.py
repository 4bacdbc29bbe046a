"""The built-in model: its corpus, its training and the measure of its answers."""
