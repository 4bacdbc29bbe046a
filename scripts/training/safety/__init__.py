"""Training and measuring the safety classifier; nothing here is needed to serve."""
