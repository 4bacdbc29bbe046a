"""The engine that embeds SGLang; the only package that imports it."""
