"""Grammars: what they cost, measured ahead in a process that can be killed."""
