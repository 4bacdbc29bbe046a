"""Safety along one request: a session that is handed values."""
