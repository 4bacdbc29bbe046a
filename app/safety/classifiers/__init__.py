"""The classifiers and their files."""
