"""Everything durable: one SQLite file, one writer, read-only readers."""
