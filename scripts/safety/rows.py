"""The rows that the classifiers learn from and are measured on: public files, and the project's own.

Public files (`--data DIR`, scripts/safety_data/MANIFEST.json) are not in the project; its own rows are, in
scripts/safety_data/: written_*.jsonl row by row, frames_*.jsonl as a sentence frame with lists of fillers,
of which row i takes the i-th of each.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.safety.labels import CODE_OF

OWN = Path(__file__).resolve().parent.parent / "safety_data"
"""Where the project's own rows are."""
MANIFEST = OWN / "MANIFEST.json"
PER_FRAME = 20
"""More rows than this of one frame are refused: they would teach the frame."""

_BLOCK = 10  # neighbouring written rows, which share words, stay together in a split
_HELD_OUT = 12  # one group of written rows in so many is never trained on


class BadRows(ValueError):
    """A file of rows is not what it should be."""


@dataclass(frozen=True, slots=True)
class Row:
    """One text. `harmful` is None where nobody has judged it.

    `category` is a code of app.safety.categories for harmful rows, `near` what a benign one sounds like;
    `group` tells rows of one frame, or written side by side, from others; of a public row it is the origin.
    """

    text: str
    harmful: bool | None
    source: str
    kind: str = "prompt"
    category: str | None = None
    near: str | None = None
    group: str = ""

    @property
    def own(self) -> bool:
        """Whether the row is the project's."""
        return self.source.startswith(("written", "frames"))

    @property
    def held_out(self) -> bool:
        """Whether the row is kept for the gates: its group is never trained on.

        Frames never are: most have a twin of the other label, which alone would teach the frame.
        """
        digest = hashlib.sha256(self.group.encode()).digest()
        return self.source.startswith("written") and digest[0] % _HELD_OUT == 0


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


def ordinary(rows: list[Row]) -> list[Row]:
    """Benign prompts that do not even sound harmful, of which the false alarms are counted."""
    return [row for row in rows if row.harmful is False and row.kind == "prompt" and row.source in ORDINARY]


ORDINARY = frozenset({
    "benign_arena_v01",
    "benign_banking77",
    "benign_clinc",
    "benign_gpteacher",
    "benign_gsm8k",
    "benign_medquad",
    "benign_safe_prompts",
    "benign_selfinstruct",
})  # fmt: skip
"""Public sources of prompts that nobody would take for harmful."""


def _public_row(source: str, raw: dict[str, Any]) -> Row:
    harmful = None if raw["label"] is None else bool(raw["label"])
    category = CODE_OF.get(raw["category"] or "") if harmful else None
    return Row(raw["text"], harmful, source, raw["kind"], category, group=raw["source"])


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
    )


def _written(path: Path) -> Iterator[Row]:
    for number, raw in _lines(path):
        group = f"{path.stem}:{number // _BLOCK}"
        yield _labelled(Row(raw["text"], None, path.stem, group=group), raw)


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
