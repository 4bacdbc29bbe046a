"""Where an answer is shown: its text on standard output, everything about it on standard error."""

from __future__ import annotations

import sys
from typing import Any

from app.cli.chat.answer import Answer, Piece
from app.cli.terminal import has_style, printable

_DIM, _UNDIM = "\x1b[2m", "\x1b[22m"


class Screen:
    """On a terminal the reasoning is dimmed; a pipe gets the answer's text alone."""

    def __init__(self) -> None:
        self._shows_reasoning = sys.stdout.isatty()
        self._has_style = has_style()
        self._at_line_start = True
        self._channel = "content"

    def show(self, piece: Piece) -> None:
        """Show new text of an answer."""
        text = printable(piece.text)
        if piece.channel == "reasoning":
            if self._shows_reasoning:
                self._channel = "reasoning"
                self._write(self._dim(text), text)
            return
        if self._channel == "reasoning":
            self._end_line()
            self._write("\n", "\n")
            self._channel = "content"
        self._write(text, text)

    def notice(self, text: str) -> None:
        """Say something about the answer, on a line of its own."""
        if sys.stdout.isatty():
            self._end_line()
        text = f"[{printable(text)}]"
        print(f"{_DIM}{text}{_UNDIM}" if has_style(sys.stderr) else text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the last line."""
        self._end_line()
        self._channel = "content"

    def _dim(self, text: str) -> str:
        return f"{_DIM}{text}{_UNDIM}" if self._has_style else text

    def _end_line(self) -> None:
        if not self._at_line_start:
            self._write("\n", "\n")

    def _write(self, styled: str, text: str) -> None:
        sys.stdout.write(styled)
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n")


def remarks(answer: Answer, *, is_stopped: bool = False) -> list[str]:
    """What has to be said about how an answer ended; nothing about an ordinary end."""
    lines = list(answer.remarks)
    if answer.error is not None:
        lines.append(_error(answer.error))
    if answer.finish_reason == "content_filter":
        categories = ", ".join(_flagged(answer.moderation or {}))
        reason = f" ({categories})" if categories else ""
        lines.append(f"The safety policy stopped the answer{reason}; nothing of the rest was sent.")
    if answer.finish_reason == "length" and not answer.remarks:
        lines.append("The answer reached the limit of its length; --max-tokens sets another.")
    if is_stopped:
        lines.append("Stopped.")
    return lines


def usage_line(answer: Answer, elapsed_s: float) -> str:
    """Model, tokens, time and conversation of an answer."""
    usage = answer.usage or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    tokens_in = f"{usage.get('prompt_tokens', 0):,} tokens in" + (f" ({cached:,} cached)" if cached else "")
    parts = [answer.model]
    if usage:
        parts += [tokens_in, f"{usage.get('completion_tokens', 0):,} out"]
    parts.append(f"{elapsed_s:.1f} s")
    if answer.reconnects:
        parts.append(f"resumed {answer.reconnects} times" if answer.reconnects > 1 else "resumed")
    if answer.conversation_id:
        parts.append(answer.conversation_id)
    return " · ".join(parts)


def _error(error: Any) -> str:
    message, code = error.get("message", "The answer failed."), error.get("code")
    advice = {
        "interrupted": " What you see is the text until then; /retry asks for another answer.",
        "engine_restarted": " /retry asks for another answer.",
        "engine_failed": " /retry asks for another answer.",
    }
    return f"{message} ({code}){advice.get(str(code), '')}"


def _flagged(moderation: Any) -> list[str]:
    """The categories for which an answer was flagged."""
    output = moderation.get("output") or {}
    results = output.get("results") or []
    return sorted(
        {name for result in results for name, is_hit in result.get("categories", {}).items() if is_hit}
    )
