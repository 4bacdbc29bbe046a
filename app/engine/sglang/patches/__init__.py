"""Replacements of SGLang's own functions, each installed in the process where SGLang calls them."""
