"""The formats of guard models, as formats.toml lists them. A new guard model needs a table there."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.settings import SettingsError

ANY = "any"
"""The label of a harm without a category."""
UNNAMED = "S2"
"""The category of such a harm if no category has a score: MLCommons' broadest category."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question for a guard. A Yes to the `guideline` means the harm `label`.

    A format whose answers name the labels has neither.
    """

    label: str | None
    guideline: str = ""


@dataclass(frozen=True, slots=True)
class GuardFormat:
    """The format of one family of guard models: its questions, and how its answers are read.

    A model belongs to the family if its name has one of the fragments `fits`. `labels` maps each label of
    the format to our category. `weights` maps each verdict word to its harm, 0 to 1; the first word is the
    harmless one. An answer begins with one of `leads`, then the verdict. `regex` constrains it to this form.
    `prompt_questions` judge a prompt, `answer_questions` an answer. Without `whole_conversation` the
    guard gets the last turn only.
    """

    name: str
    fits: tuple[str, ...]
    template: str
    labels: Mapping[str, str]
    prompt_questions: tuple[Question, ...]
    answer_questions: tuple[Question, ...]
    weights: Mapping[str, float]
    leads: tuple[str, ...]
    regex: str
    max_tokens: int
    whole_conversation: bool

    def names(self, text: str) -> list[str]:
        """Our categories for the labels in an answer, in the answer's order."""
        _, _, listed = text.strip().partition("\n")
        listed = listed.strip().partition("\n")[0].removeprefix("Categories:")
        labelled = (self.labels.get(name.strip()) for name in listed.split(","))
        return list(dict.fromkeys(category for category in labelled if category is not None))


def _formats() -> Iterator[GuardFormat]:
    """The formats of formats.toml, where `{subject}` in a guideline is who or what is judged."""
    tables: Mapping[str, dict[str, Any]] = tomllib.loads(
        Path(__file__).with_name("formats.toml").read_text("utf-8")
    )
    for name, table in tables.items():
        guidelines = table.pop("guidelines", {})
        subjects = (table.pop("prompt_subject", ""), table.pop("answer_subject", ""))
        prompts_only = table.pop("prompts_only", ())
        prompt, answer = (
            tuple(Question(label, text.replace("{subject}", subject)) for label, text in guidelines.items())
            or (Question(None),)
            for subject in subjects
        )
        table |= {"fits": tuple(table["fits"]), "leads": tuple(table["leads"])}
        answer = tuple(question for question in answer if question.label not in prompts_only)
        yield GuardFormat(name=name, prompt_questions=prompt, answer_questions=answer, **table)


FORMATS: tuple[GuardFormat, ...] = tuple(_formats())


def format_of(model: str) -> GuardFormat:
    """The format of a guard model by its path or hub id. Raises SettingsError for an unknown one."""
    name = model.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    for candidate in FORMATS:
        if any(fragment in name for fragment in candidate.fits):
            return candidate
    raise SettingsError(
        f"safety_guard_model: {model!r} is no guard model that is known here; its name must hold one of"
        f" {', '.join(candidate.name for candidate in FORMATS)}"
    )
