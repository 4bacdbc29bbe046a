"""Pages of docs/: links lead somewhere, sentences are short, figures are those of the code."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from app.cli.main import parser
from app.errors import CODES
from app.settings import Settings
from app.store.conversations import Status

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    path.relative_to(DOCS).with_suffix("").as_posix()
    for path in DOCS.rglob("*.md")
    if path.parent.name != "log"
)
"""All but the log, which is a record."""
FRONT = ("../README", "../CONTRIBUTING", "../SECURITY")
"""Pages beside docs/."""
MAX_WORDS = 40
"""Of a sentence."""
MAX_PAGE_WORDS = 2000
MAX_USER_WORDS = 45_000
MAX_GLOSSARY_WORDS = 40
REFERENCES = frozenset({"api", "parameters", "settings", "metrics", "errors"})
"""Pages to look something up in, of any length."""
NOT_FOR_USERS = ("decisions/", "inside/", "measuring", "architecture")
"""Pages that nobody has to read to use or run the product; the log is no page at all."""
DEFAULTS = (
    ("operate", "`drain_timeout_s` ({:g} s) at most", "drain_timeout_s", 1),
    ("deploy", "`heartbeat_s` ({:g} s)", "heartbeat_s", 1),
    ("sizing", "{:g} GiB at most | `retained_bytes`", "retained_bytes", 2**30),
    ("sizing", "{:g} GiB at most | `body_memory_bytes`", "body_memory_bytes", 2**30),
    ("sizing", "`max_request_pixels` ({:,.0f})", "max_request_pixels", 1),
    ("storage", "`retention_s` ({:g} minutes)", "retention_s", 60),
    ("storage", "`purge_after_days` ({:g})", "purge_after_days", 1),
    ("admission", "**With `key_slowdown`** (default {:g})", "key_slowdown", 1),
    ("grammars", "| `grammar_check_s` | {:g} s |", "grammar_check_s", 1),
    ("grammars", "| `grammar_mask_ms` | {:g} ms |", "grammar_mask_ms", 1),
    ("routing", "`degrade_short_tokens` tokens ({:g})", "degrade_short_tokens", 1),
    ("routing", "`degrade_rise_s` ({:g} s)", "degrade_rise_s", 1),
    ("routing", "`degrade_fall_s` ({:g} s)", "degrade_fall_s", 1),
    ("conversations", "`purge_after_days` (default {:g} days)", "purge_after_days", 1),
    ("limits", "{:g} s for `batch`", "queue_batch_s", 1),
    ("limits", "{:g} s for `standard`", "queue_standard_s", 1),
    ("limits", "{:g} s\nfor `interactive`", "queue_interactive_s", 1),
    ("limits", "{:g} s (`body_timeout_s`)", "body_timeout_s", 1),
    ("limits", "{:g} MiB (`body_memory_bytes`)", "body_memory_bytes", 2**20),
    ("limits", "{:g} (`max_images`)", "max_images", 1),
    ("limits", "{:.1f} million pixels each (`max_image_pixels`)", "max_image_pixels", 1e6),
    ("limits", "{:.0f} million together (`max_request_pixels`)", "max_request_pixels", 1e6),
    ("limits", "{:,.0f} (`max_live_streams`)", "max_live_streams", 1),
    ("limits", "{:g} a second (`max_reads_per_s`)", "max_reads_per_s", 1),
    ("resume", "{:g} s | `resume_grace_s` |", "resume_grace_s", 1),
    ("resume", "{:g} s | `abandon_grace_s` |", "abandon_grace_s", 1),
    ("resume", "{:g} minutes | `retention_s` |", "retention_s", 60),
    ("resume", "every {:g} s (`heartbeat_s`)", "heartbeat_s", 1),
    ("resume", "for {:g} s (`stall_timeout_s`)", "stall_timeout_s", 1),
)
"""Page, words, setting, and the unit of the words in those of the setting."""


def prose(page: str) -> str:
    """A page without its code blocks and comments."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)


def words_of(page: str) -> int:
    """The words of a page, its code and tables included; marks such as `|` and `#` are none."""
    return sum(bool(re.search(r"\w", word)) for word in (DOCS / f"{page}.md").read_text("utf-8").split())


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


@pytest.mark.parametrize("page", [*PAGES, *FRONT])
def test_links_lead_to_a_page_and_a_heading(page: str):
    """Every relative link names a file that is there and, after `#`, one of its headings."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = DOCS / f"{page}.md"
        path = (file.parent / name).resolve() if name else file
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_every_page_can_be_reached_from_the_index():
    """By links alone, from page to page."""
    reached, left = set(), [DOCS / "index.md"]
    while left:
        page = left.pop()
        if page in reached or not page.is_file() or page.suffix != ".md":
            continue
        reached.add(page)
        targets = re.findall(r"\]\((?![a-z]+:)([^)\s#]+)", page.read_text("utf-8"))
        left += [(page.parent / target).resolve() for target in targets]
    assert set(DOCS.rglob("*.md")) - reached == set()


@pytest.mark.parametrize("page", [*PAGES, *FRONT])
def test_every_path_of_the_code_exists(page: str):
    """A path below `app/`, in text or in a link, is a file or a folder."""
    paths = re.findall(r"(?<![\w/-])app/[\w/-]+(?:\.\w+)?", (DOCS / f"{page}.md").read_text("utf-8"))
    assert [path for path in paths if not (DOCS.parent / path).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *FRONT])
def test_no_sentence_is_longer_than_forty_words(page: str):
    """A sentence with one idea is shorter."""
    long = [s for s in sentences(prose(page)) if len(re.findall(r"[\w'-]+", s)) > MAX_WORDS]
    assert long == []


@pytest.mark.parametrize("page", sorted({*PAGES, *FRONT} - REFERENCES))
def test_no_page_is_longer_than_two_thousand_words(page: str):
    """A page is read as a whole, but for references."""
    assert words_of(page) <= MAX_PAGE_WORDS


def test_a_user_has_at_most_forty_five_thousand_words_to_read():
    """The README and all pages but those on the inside."""
    pages = [page for page in PAGES if not page.startswith(NOT_FOR_USERS)]
    assert sum(map(words_of, ["../README", *pages])) <= MAX_USER_WORDS


def test_the_glossary_has_at_most_forty_words():
    """In alphabetical order."""
    words = re.findall(r"^\| ([^|]+) \| ", prose("glossary"), re.MULTILINE)[1:]
    assert 0 < len(words) <= MAX_GLOSSARY_WORDS
    assert words == sorted(words, key=str.lower)


@pytest.mark.parametrize(("page", "words", "setting", "unit"), DEFAULTS)
def test_defaults_are_those_of_the_settings(page: str, words: str, setting: str, unit: float):
    """A default that a page tells is the setting's."""
    text = " ".join((DOCS / f"{page}.md").read_text("utf-8").split())
    assert " ".join(words.format(getattr(Settings(), setting) / unit).split()) in text


@pytest.mark.parametrize("page", PAGES)
def test_codes_have_the_status_that_is_told_with_them(page: str):
    """What reads as a status and a code is a status and its code."""
    for status, code in re.findall(r"(?<!` \| )\b([45]\d\d)(?: \|)? `([a-z_]+)`", prose(page)):
        assert CODES[code].status == int(status), code


def test_every_status_of_a_message_is_explained():
    """docs/conversations.md has a row for each status, and no other."""
    table = prose("conversations").partition("| `status` | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(get_args(Status))


def test_commands_are_taken_by_the_command_line():
    """Each line that begins with `tokenring` can be typed as it stands."""
    texts = [(DOCS / f"{page}.md").read_text("utf-8") for page in PAGES]
    lines = [line for text in texts for line in re.findall(r"^tokenring (.*)$", text, re.MULTILINE)]
    assert lines
    for line in lines:
        parser().parse_args(shlex.split(line, comments=True))
