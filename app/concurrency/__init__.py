"""Owners that share something slow: a gate at which they alternate, and threads behind one."""
