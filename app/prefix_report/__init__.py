"""The report on shared prompt prefixes."""
