"""The rows that the classifiers learn from and are measured on: public files, and the project's own.

A third source is what the built-in model is asked (`asked`): the project's too, but ordinary prompts, and
left out of a fold like a public source. What is kept apart (`kept_apart`) no training ever sees: everyday
questions whose words sound dangerous, in fourteen languages, and chats whose turns do so together.

Public files (`--data DIR`, scripts/training/safety_data/MANIFEST.json) are not in the project. Its own rows
are, in scripts/training/safety_data/: written_*.jsonl row by row, frames_*.jsonl as a sentence frame with
lists of fillers, of which row i takes the i-th of each.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.safety.text.normalize import normalize
from scripts.training.safety.labels import CODE_OF

TRAINING = Path(__file__).resolve().parents[1]
OWN = TRAINING / "safety_data"
"""Where the project's own rows are."""
BUILTIN = TRAINING / "builtin_model"
"""Where the questions are that the built-in model is trained and examined with."""
ASKED = "asked"
"""The source of what it is trained with."""
MANIFEST = OWN / "MANIFEST.json"
EVERYDAY, THIRD_TURNS = "everyday", "third turns"
KEPT_APART = (EVERYDAY, THIRD_TURNS)
"""How the names of the sources begin that no training sees."""
LAST_LATIN = "\u024f"
"""The end of the Latin letters in Unicode's order; of what is behind it, little is common in Latin texts."""
OTHER_LETTERS = 0.3
"""The share of others at which a text is not taken for English."""
PER_FRAME = 20
"""More rows than this of one frame are refused: they would teach the frame."""

_BLOCK = 10  # neighbouring written rows, which share words, stay together in a split
_HELD_OUT = 12  # one group of written rows in so many is never trained on


class BadRows(ValueError):
    """A file of rows is not what it should be."""


@dataclass(frozen=True, slots=True)
class Row:
    """One text. `harmful` is None where nobody has judged it.

    `category` is a code of app.safety.categories for harmful rows, `near` what a benign one sounds like.
    `group` tells rows of one frame, or written side by side, from others; of a public row it is the origin.
    `language` is its code, of the project's rows that say it.
    """

    text: str
    harmful: bool | None
    source: str
    kind: str = "prompt"
    category: str | None = None
    near: str | None = None
    group: str = ""
    language: str | None = None

    @property
    def own(self) -> bool:
        """Whether the row was written for the classifiers."""
        return self.source.startswith(("written", "frames"))

    @property
    def is_english(self) -> bool | None:
        """Whether the row is in English, where that is sure."""
        if self.language is not None:
            return self.language == "en"
        if self.source in FOREIGN:
            return False
        if sum(char > LAST_LATIN for char in self.text) > OTHER_LETTERS * len(self.text):
            return False
        return None if self.source in MIXED or not self.text.isascii() else True

    @property
    def held_out(self) -> bool:
        """Whether the row is kept for the gates: its group is never trained on.

        Frames never are: most have a twin of the other label, which alone would teach the frame.
        """
        if self.source.startswith(KEPT_APART):
            return True
        digest = hashlib.sha256(self.group.encode()).digest()
        return self.source.startswith(("written", ASKED)) and digest[0] % _HELD_OUT == 0


def own(folder: Path = OWN) -> list[Row]:
    """The project's own rows, without repetitions. Raises BadRows."""
    rows: list[Row] = []
    for path in sorted(folder.glob("written_*.jsonl")):
        rows.extend(_written(path))
    for path in sorted(folder.glob("frames_*.jsonl")):
        rows.extend(_framed(path))
    return list({row.text: row for row in rows}.values())


def public(folder: Path, manifest: Path = MANIFEST) -> list[Row]:
    """The rows of the public files, checked against the manifest. Raises BadRows, OSError."""
    rows: list[Row] = []
    for name, entry in json.loads(manifest.read_text()).items():
        packed = (folder / name).read_bytes()
        if hashlib.sha256(packed).hexdigest() != entry["sha256"]:
            raise BadRows(f"{name} is not the file that MANIFEST.json names")
        source = name.removesuffix(".jsonl.gz")
        lines = gzip.decompress(packed).splitlines()
        rows.extend(_public_row(source, json.loads(line)) for line in lines)
    return rows


def as_answers(rows: Sequence[Row]) -> list[Row]:
    """Ordinary prompts that a model could have written, as harmless answers: stories, documents, code."""
    return [
        replace(row, kind="output", source=f"{row.source} as answers", near=None)
        for row in rows
        if row.source in LIKE_ANSWERS and row.kind == "prompt" and len(row.text) >= LEAST_ANSWER_CHARS
    ]


def kept_apart(folder: Path = OWN) -> list[Row]:
    """Ordinary prompts that no training sees: `everyday <language>`, and `third turns` as they are joined."""
    everyday = [
        replace(_labelled(Row(_text(raw), None, f"{EVERYDAY} {raw['lang']}"), raw), group=raw["lang"])
        for _, raw in _lines(folder / "everyday.jsonl")
    ]
    turns = [
        _labelled(Row(_text(raw), None, THIRD_TURNS), raw) for _, raw in _lines(folder / "third_turns.jsonl")
    ]
    return everyday + turns


FOREIGN = frozenset(
    {"written_15", "benign_multilingual", "benign_cyber_frr_multilingual", "xsafety_multilingual"}
)
"""Public sources without English."""
MIXED = frozenset({"benign_lobe_agents", "benign_templates", "benign_creative_roleplay"})
"""Public sources in many languages, English among them."""
LIKE_ANSWERS = frozenset({
    "benign_arena_v01",
    "benign_fiction_long",
    "benign_fiction_long (half)",
    "benign_gpteacher",
    "benign_instructions",
    "benign_long_documents",
    "benign_medquad",
    "benign_multilingual",
    "benign_tool_requests",
})  # fmt: skip
"""Sources whose prompts read like what a model writes."""
HALF = " (half)"
"""What the name of a source ends with that has half of the authors of a file."""
HALVED = {
    "benign_fiction_long": frozenset({
        "agatha-christie", "bram-stoker", "edgar-allan-poe", "fyodor-dostoevsky", "jane-austen",
        "p-g-wodehouse", "philip-k-dick", "robert-e-howard", "walt-whitman", "william-shakespeare",
    }),
}  # fmt: skip
"""Files whose authors are left out by halves, each with half of each kind: the only file of its kind."""
LEAST_ANSWER_CHARS = 80
"""Characters that a prompt has at least to be taken for an answer."""


def asked(folder: Path = BUILTIN) -> list[Row]:
    """What the built-in model is trained to answer, one group an intent. Nothing that it is examined with.

    Insults are left out: whether they are harmless is not for the classifiers to learn from here.
    """
    never = {normalize(text) for text in examined(folder)}
    rows: dict[str, Row] = {}
    for path in sorted((folder / "corpus").glob("asked_*.txt")):
        intent = ""
        for line in path.read_text().splitlines():
            if line.startswith("++ "):
                intent = line.removeprefix("++ ").strip()
            elif line.startswith("Q: ") and intent != "insult":
                text = line.removeprefix("Q: ").strip()
                rows[normalize(text)] = Row(text, harmful=False, source=ASKED, group=f"{ASKED}:{intent}")
    return [row for text, row in rows.items() if text not in never]


def examined(folder: Path = BUILTIN) -> list[str]:
    """The questions that the built-in model is measured with: nothing here is trained on them either."""
    return [*exam(folder), *(line.partition(": ")[2] for line in _plain_lines(folder / "dev_questions.txt"))]


def exam(folder: Path = BUILTIN) -> list[str]:
    """The questions of its exam (scripts/eval_builtin_model)."""
    return [json.loads(line)["question"] for line in _plain_lines(folder / "questions.jsonl")]


def _plain_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


def ordinary(rows: list[Row]) -> list[Row]:
    """Benign prompts that do not even sound harmful, of which the false alarms are counted."""
    return [row for row in rows if row.harmful is False and row.kind == "prompt" and row.source in ORDINARY]


ORDINARY = frozenset({
    ASKED,
    "benign_arena_v01",
    "benign_banking77",
    "benign_clinc",
    "benign_gpteacher",
    "benign_gsm8k",
    "benign_medquad",
    "benign_safe_prompts",
    "benign_selfinstruct",
})  # fmt: skip
"""Sources of prompts that nobody would take for harmful."""


def _public_row(source: str, raw: dict[str, Any]) -> Row:
    harmful = None if raw["label"] is None else bool(raw["label"])
    category = CODE_OF.get(raw["category"] or "") if harmful else None
    author = raw["source"].rpartition("/")[2].partition("_")[0]
    if author in HALVED.get(source, ()):
        source += HALF
    _, _, language = (
        (raw["category"] or "").partition("/") if source == "xsafety_multilingual" else ("", "", "")
    )
    return Row(
        raw["text"],
        harmful,
        source,
        raw["kind"],
        category,
        group=raw["source"],
        language=language or None,
    )


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(path.read_text().splitlines()):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as exc:
                raise BadRows(f"{path.name}:{number + 1} is no JSON: {exc}") from exc


def _labelled(row: Row, raw: dict[str, Any]) -> Row:
    benign = raw["category"] == "benign"
    return replace(
        row,
        harmful=not benign,
        kind=raw["kind"],
        category=None if benign else raw["category"],
        near=raw.get("near") if benign else None,
        language=raw.get("lang"),
    )


def _written(path: Path) -> Iterator[Row]:
    for number, raw in _lines(path):
        group = f"{path.stem}:{number // _BLOCK}"
        yield _labelled(Row(_text(raw), None, path.stem, group=group), raw)


def _text(raw: dict[str, Any]) -> str:
    """The text of a row; the turns of a chat as the prompt screen joins them."""
    return str(raw["text"]) if "text" in raw else "\n".join(raw["turns"])


def _framed(path: Path) -> Iterator[Row]:
    for number, raw in _lines(path):
        frame = raw["frame"]
        slots = {key: raw[key] for key in raw if f"{{{key}}}" in frame}
        counts = {len(fillers) for fillers in slots.values()}
        if len(counts) != 1 or max(counts) > PER_FRAME:
            raise BadRows(f"{path.name}:{number + 1} needs lists of one length, at most {PER_FRAME}")
        for index in range(counts.pop()):
            text = frame
            for key, fillers in slots.items():
                text = text.replace(f"{{{key}}}", fillers[index])
            yield _labelled(Row(text, None, path.stem, group=f"{path.stem}:{number}"), raw)
