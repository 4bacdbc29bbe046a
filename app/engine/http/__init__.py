"""The engine that uses SGLang servers over HTTP, child processes among them."""
