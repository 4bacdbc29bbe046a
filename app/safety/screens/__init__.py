"""The screens: of prompts, of streams, and the moderation route's."""
