"""Past turns given to the model as the token ids they were, not as their text tokenizes.

This avoids retokenization mismatches: a model may generate a word in other tokens than a tokenizer makes of
it, and the prefix cache has the generated ones. The prompt always decodes to the rendered text, to the
character.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from app.engine.sglang.tokenizer import TokenizerText

_BROKEN = "\ufffd"


class Splice(NamedTuple):
    """A prompt's ids, how many runs they begin with, and why not with all."""

    token_ids: Sequence[int]
    past_runs: int = 0
    rerendered: str | None = None


def splice(rendered: Sequence[int], past: Sequence[Sequence[int]], text: TokenizerText) -> Splice:
    """Runs of `past` in place of the rendered ids that they say the same as; linear in both."""
    if not past:
        return Splice(rendered)
    whole = text.decode(rendered)
    num_characters, reason = 0, None
    taken: list[Sequence[int]] = []
    for turn, run in enumerate(past, start=1):
        run_text = text.decode(run) if _is_in_vocabulary(run, text) else None
        reason = _misfit(run_text, whole, num_characters, turn)
        if run_text is None or reason is not None:
            break
        num_characters += len(run_text)
        taken.append(run)
    if not taken:
        return Splice(rendered, 0, reason)
    token_ids = list(itertools.chain.from_iterable(taken))
    if num_characters < len(whole):
        token_ids += text.encode(whole[num_characters:])
    if text.decode(token_ids) != whole:
        return Splice(rendered, 0, "tokenizer cannot join turns")
    return Splice(token_ids, len(taken), reason)


def _is_in_vocabulary(run: Sequence[int], text: TokenizerText) -> bool:
    return not run or 0 <= min(run) <= max(run) < text.vocabulary


def _misfit(run_text: str | None, whole: str, at: int, turn: int) -> str | None:
    """The reason for which a run's text cannot stand in the whole at `at`."""
    if run_text is None:
        return f"unknown token in turn {turn}"
    if run_text.endswith(_BROKEN):
        return f"half a character ends turn {turn}"
    return None if whole.startswith(run_text, at) else f"template changed turn {turn}"
