"""The pages for callers: their links lead somewhere, and their sentences are short."""

import re
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "admin-api",
    "api",
    "conversations",
    "errors",
    "limits",
    "parameters",
    "resume",
    "service-routes",
)
MAX_WORDS = 40


def prose(page: str) -> str:
    """A page without its code blocks and comments."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def sentences(text: str) -> list[str]:
    """Sentences, list items, headings and table cells, without link targets and code."""
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\||#))", text)
    units = [unit for p in paragraphs for unit in (p.split(" | ") if p.lstrip().startswith("|") else [p])]
    plain = [re.sub(r"`[^`]*`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", unit)) for unit in units]
    return [sentence for unit in plain for sentence in re.split(r"(?<=[.!?:;])\s+", unit)]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_page_and_a_heading(page: str):
    """Every relative link names a file that is there and, after `#`, one of its headings."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (DOCS / name).resolve() if name else DOCS / f"{page}.md"
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_longer_than_forty_words(page: str):
    """A sentence with one idea is shorter."""
    long = [s for s in sentences(prose(page)) if len(re.findall(r"[\w'-]+", s)) > MAX_WORDS]
    assert long == []
