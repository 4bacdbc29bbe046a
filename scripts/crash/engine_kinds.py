"""Requests of several kinds for the built-in model, whose greedy answers are the same each time."""

from __future__ import annotations

MODEL = "tokenring-builtin"
RING = {
    "type": "object",
    "properties": {"ring": {"type": "string", "pattern": "^[a-z]{150}$"}},
    "required": ["ring"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "ring", "schema": RING, "strict": True}}
TOOL = {"type": "function", "function": {"name": "ring", "strict": True, "parameters": RING}}
