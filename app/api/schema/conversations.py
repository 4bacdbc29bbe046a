"""Parameters of the conversation routes: the words of a search, and a title."""

from __future__ import annotations

from typing import Any

from app.api.schema.parameters import check_kind
from app.errors import BadRequest, unknown_parameter

MAX_TITLE = 200
MAX_QUERY = 1000


def search_words(raw: str) -> str:
    """The words of `q`; empty for all conversations. Raises BadRequest."""
    if len(raw) > MAX_QUERY:
        raise BadRequest(f"q must have at most {MAX_QUERY} characters, got {len(raw)}.", param="q")
    return raw.strip()


def new_title(body: dict[str, Any]) -> str:
    """The title in a body. Raises BadRequest."""
    for name in body:
        if name != "title":
            raise unknown_parameter(name, advice="only title can be changed")
    if "title" not in body:
        raise BadRequest("title is required.", code="missing_parameter", param="title")
    title = body["title"]
    check_kind("title", title, str)
    if not title.strip():
        raise BadRequest("title must not be empty.", param="title")
    if len(title) > MAX_TITLE:
        raise BadRequest(f"title must have at most {MAX_TITLE} characters, got {len(title)}.", param="title")
    assert isinstance(title, str)
    return title
