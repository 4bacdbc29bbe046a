"""The first stage of safety: prompts, and the texts of the moderation routes."""
