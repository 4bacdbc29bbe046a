"""Safety: prompts and answers, screened before it is generated and before it is released."""
