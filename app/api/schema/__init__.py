"""The schema of requests and responses: parameters, messages, key terms, OpenAPI."""
