"""What a generation goes through: history, safety check, release, journal, trace."""
