"""Admission: which requests enter the engine, when, and which are refused."""
