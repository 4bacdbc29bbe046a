"""The way in, from the head of a request to its stream: `Intake.open_stream`, for every endpoint."""
