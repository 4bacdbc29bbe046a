"""Owners that share something slow: a gate at which they take turns, and threads behind one."""
