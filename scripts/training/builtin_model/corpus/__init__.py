"""The training text: intents with hand-written wordings, dialogues, tools and noise, drawn from a seed."""
