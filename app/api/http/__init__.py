"""HTTP: requests in, responses and errors out, connections."""
