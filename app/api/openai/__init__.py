"""OpenAI's response shapes."""
