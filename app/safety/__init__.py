"""Safety: what is asked and what is answered, screened before it is generated and before it is released."""
