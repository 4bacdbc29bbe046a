"""HTTP: routes, auth, wire types, SSE encoding. Knows requests and bytes, not engines."""
