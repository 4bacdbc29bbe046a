"""Answers that the previous process suspended, and how this one continues them."""
