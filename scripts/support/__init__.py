"""Modules that the scripts of this folder and the checks run."""
