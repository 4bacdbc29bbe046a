"""What requests and responses hold: parameters, messages, key terms, OpenAPI."""
