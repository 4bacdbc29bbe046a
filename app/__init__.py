"""Tokenring: one process that turns one GPU node into a chat service."""
