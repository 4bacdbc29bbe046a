"""The tables behind `/metrics`."""
