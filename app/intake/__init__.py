"""The way in: from the head of a request to its stream. Every door leads through `Intake.open_stream`."""
