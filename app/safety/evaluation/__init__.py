"""Evaluations of prompts and replies."""
