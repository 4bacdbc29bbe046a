"""Text as the classifiers read it."""
