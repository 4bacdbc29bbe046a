"""Reads the intent files and draws questions for an intent.

An intent file has blocks headed `== name`; its lines are `A:` an answer (as it is), `Q:` a whole question,
`V:` a thing to do (infinitive), `S:` a told situation, `N:` a topic. All but `A:` are grammar patterns.
A block headed `++ name` adds wordings to an intent of another file. The files `asked_*.txt` hold questions as
people would write them, word for word and no patterns; most of the questions drawn are theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from scripts.training.builtin_model.grammar import Lexicon, Pattern, expand, parse, slots_of

FOLDER = Path(__file__).parent
WRAPPED = ("V", "S", "N")
ASKED_SHARE = 0.85
_NOT_INTENTS = ("lexicon.txt", "wrappers.txt")
_SPACES = re.compile(r" {2,}")
_SPACE_BEFORE_MARK = re.compile(r" ([?.!,])(?= |$)")


@dataclass(frozen=True, slots=True)
class Intent:
    """One thing a user may want, the answers to it, and its wordings by kind (Q, V, S, N)."""

    name: str
    topic: str
    answers: tuple[str, ...]
    wordings: tuple[tuple[str, Pattern], ...]
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wordings:
    """Everything that questions are made of."""

    intents: tuple[Intent, ...]
    lexicon: Lexicon
    wrappers: Lexicon


@dataclass(slots=True)
class _Block:
    """One block of an intent file while it is read; `adds` when it is headed `++`."""

    name: str
    topic: str
    adds: bool
    answers: list[str] = field(default_factory=list)
    wordings: list[tuple[str, Pattern]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


def load_wordings(folder: Path = FOLDER) -> Wordings:
    """Read and check the whole corpus folder; raises `ValueError` naming a bad line."""
    lexicon = _read_slots(folder / "lexicon.txt")
    wrappers = _read_slots(folder / "wrappers.txt")
    files = sorted(path for path in folder.glob("*.txt") if path.name not in _NOT_INTENTS)
    blocks = [block for path in files for block in _read_blocks(path)]
    intents = tuple(_merge(block, blocks) for block in blocks if not block.adds)
    names = [intent.name for intent in intents]
    wrong = {block.name for block in blocks if names.count(block.name) != 1}
    if wrong:
        raise ValueError(f"intents without or with several headings: {sorted(wrong)}")
    for intent in intents:
        missing = {slot for _, wording in intent.wordings for slot in slots_of(wording)} - set(lexicon)
        if missing:
            raise ValueError(f"{intent.name}: unknown slots {sorted(missing)}")
    return Wordings(intents, lexicon, wrappers)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            yield number, line.strip()


def _read_slots(path: Path) -> dict[str, tuple[Pattern, ...]]:
    """A file of `name: pattern ;; pattern`; a name given again adds to what it has."""
    slots: dict[str, tuple[Pattern, ...]] = {}
    for number, line in _lines(path):
        name, colon, rest = line.partition(": ")
        if not colon:
            raise ValueError(f"{path.name}:{number}: no `name: `")
        slots[name] = slots.get(name, ()) + tuple(parse(option.strip()) for option in rest.split(" ;; "))
    return slots


def _read_blocks(path: Path) -> list[_Block]:
    blocks: list[_Block] = []
    for number, line in _lines(path):
        if line[:3] in {"== ", "++ "}:
            blocks.append(_Block(line[3:], path.stem, adds=line.startswith("++")))
            continue
        kind, colon, text = line.partition(": ")
        if not colon or not blocks or kind not in {"A", "Q", *WRAPPED}:
            raise ValueError(f"{path.name}:{number}: not an intent line")
        if kind == "A":
            blocks[-1].answers.append(text)
        elif path.stem.startswith("asked_"):
            blocks[-1].asked.append(text.strip())
        else:
            blocks[-1].wordings.append((kind, _parse_at(path, number, text)))
    return blocks


def _parse_at(path: Path, number: int, text: str) -> Pattern:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path.name}:{number}: {error}") from None


def _merge(block: _Block, blocks: list[_Block]) -> Intent:
    same = [other for other in blocks if other.name == block.name]
    answers = tuple(answer for other in same for answer in other.answers)
    wordings = tuple(wording for other in same for wording in other.wordings)
    if not answers or not wordings:
        raise ValueError(f"intent {block.name!r} needs answers and wordings")
    asked = tuple(text for other in same for text in other.asked)
    return Intent(block.name, block.topic, answers, wordings, asked)


def draw_question(intent: Intent, wordings: Wordings, rng: Random) -> str:
    """One wording of the intent, wrapped as its kind asks, before any noise."""
    if intent.asked and rng.random() < ASKED_SHARE:
        return rng.choice(intent.asked)
    kind, pattern = rng.choice(intent.wordings)
    text = expand(pattern, wordings.lexicon, rng)
    if kind in WRAPPED:
        slots = {**wordings.lexicon, "x": ((text,),)}
        text = expand(rng.choice(wordings.wrappers[kind]), slots, rng)
    return tidy(text)


def draw_aside(name: str, wordings: Wordings, rng: Random) -> str:
    """A prefix, a suffix or a filler word (`name`) to put around or into a question."""
    return tidy(expand(rng.choice(wordings.wrappers[name]), wordings.lexicon, rng))


def tidy(text: str) -> str:
    """Single spaces, none before a mark or at the ends."""
    return _SPACE_BEFORE_MARK.sub(r"\1", _SPACES.sub(" ", text)).strip()
