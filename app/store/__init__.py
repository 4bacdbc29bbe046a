"""The durable state: one SQLite file, one writer, read-only readers."""
