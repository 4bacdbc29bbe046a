"""The words and signs by which app.routing.router classifies a request, with their points.

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


def _words(two_points: str, one_point: str) -> Mapping[str, int]:
    return dict.fromkeys(_split(two_points), 2) | dict.fromkeys(_split(one_point), 1)


CODE_WORDS = _words(
    "python javascript typescript java rust golang c++ sql regex bash compiler segfault refactor dockerfile"
    " kubernetes algorithm debug stacktrace postgres implement react docker git linux concurrency deadlock"
    " recursion database schema middleware backend frontend microservice webhook css html",
    "function class script api test tests bug code query cache thread server container component variable"
    " array loop endpoint deploy json yaml library exception error log performance memory",
)
MATH_WORDS = _words(
    "prove proof theorem lemma integral derivative eigenvalue eigenvalues polynomial probability equation"
    " equations matrix modulo logarithm convergence variance induction derive",
    "solve calculate sum triangle expected coin dice formula average percent rate",
)
HARD_WORDS = _words(
    "analyse analyze compare critique evaluate architecture strategy trade-offs tradeoffs diagnose thorough"
    " comprehensive step-by-step reasoning implications essay contract investigate hypothesis optimise"
    " optimize migration root-cause constraints design plan assess argument schedule distributed in-depth",
    "detailed explain why pros cons review report outline recommend argue legal risks step steps draft"
    " research how differences difference depth budget system cause causes policy improve",
)
TASK_WORDS = _words(
    "",
    "build create configure set develop write find propose discuss interpret summarise summarize calculate"
    " generate produce model parser algorithm install troubleshoot fix convert examine describe prepare",
)
"""Something is to be made."""
EASY_WORDS = frozenset(
    _split(
        "hi hello hey thanks thank yes no ok translate spelling rephrase synonym capital rhyme joke emoji"
        " shorten title greeting define name"
    )
)
