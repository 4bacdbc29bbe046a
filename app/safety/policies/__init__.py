"""Policies: the file, the thresholds, the notices, the prompt text."""
