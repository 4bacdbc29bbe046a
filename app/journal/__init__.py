"""The journal: what is stored of a request while it runs and when it ends."""
