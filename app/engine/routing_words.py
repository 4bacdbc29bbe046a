"""The words and signs by which app.engine.routing tells what is asked for, with their points.

English, as are most words of code; other languages are judged by signs, length and depth alone.
"""

from __future__ import annotations

from collections.abc import Mapping


def _split(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


CODE_SIGNS = _split(
    "def |function(|function (|#include|public static|console.log|Traceback (most|SELECT |INSERT INTO|=>|};"
    "|();|):\n|</|std::|print(|const |#!/|==|!=|&&|->|import |{\n|NullPointer|Exception|undefined",
    "|",
)
"""Two of them, or a fence, are code."""
MATH_SIGNS = ("\\frac", "\\int", "\\sum", "\\sqrt", "\\lim", "$$", "\\(", *"∑∫√∂∈∀∃≤≥≠∞")
"""One of them is mathematics."""


def _words(two: str, one: str) -> Mapping[str, int]:
    return dict.fromkeys(_split(two), 2) | dict.fromkeys(_split(one), 1)


CODE_WORDS = _words(
    "python javascript typescript java rust golang c++ sql regex bash compiler segfault refactor dockerfile"
    " kubernetes algorithm debug stacktrace postgres",
    "function class script api implement test tests bug code query",
)
MATH_WORDS = _words(
    "prove proof theorem lemma integral derivative eigenvalue eigenvalues polynomial probability equation"
    " equations matrix modulo logarithm convergence",
    "solve calculate sum triangle expected coin dice",
)
HARD_WORDS = _words(
    "analyse analyze compare critique evaluate architecture strategy trade-offs tradeoffs derive diagnose"
    " thorough comprehensive step-by-step reasoning implications essay contract investigate hypothesis"
    " optimise optimize migration root-cause",
    "design plan detailed explain why pros cons review report outline assess recommend argue legal risks step"
    " steps constraints draft research",
)
EASY_WORDS = frozenset(
    _split(
        "hi hello hey thanks thank yes no ok translate spelling rephrase synonym capital rhyme joke emoji shorten"
        " title greeting define name"
    )
)
