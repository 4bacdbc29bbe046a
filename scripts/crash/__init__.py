"""`scripts/crashtest`: kills the server at random moments, starts it again, checks its books and streams."""
