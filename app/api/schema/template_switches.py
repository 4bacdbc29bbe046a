"""`chat_template_kwargs` and `reasoning_effort`: what a caller may set of a model's chat template.

Every name that a template reads can be set so, and what a template prints may stand before the operator's
words: special tokens, dates, tools. So there are switches only, in values that are no text of a caller's.
They are those that templates of the models that SGLang serves read; a model heeds its own and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from app.errors import BadRequest, UnsupportedParameter

EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts of SGLang's request model, and `no_think` of Hunyuan's template."""
MAX_THINKING_TOKENS = 1_000_000


class Switch(NamedTuple):
    """A switch is true or false, where it has no words and no range."""

    words: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    whole: bool = True

    def takes(self, value: Any) -> bool:
        """True if the template may be given this."""
        if isinstance(value, bool):
            return not self.words and self.minimum is None
        if isinstance(value, str):
            return value in self.words
        if (
            self.minimum is None
            or self.maximum is None
            or not isinstance(value, int if self.whole else int | float)
        ):
            return False
        return self.minimum <= value <= self.maximum

    def __str__(self) -> str:
        """The accepted values, for people."""
        words = ", ".join(f"`{word}`" for word in self.words)
        if self.minimum is None:
            return words or "true or false"
        numbers = f"{'an integer' if self.whole else 'a number'} from {self.minimum:,} to {self.maximum:,}"
        return f"{words}, or {numbers}" if words else numbers


EFFORT = Switch(EFFORTS, 0, 1, whole=False)
SWITCHES: Mapping[str, Switch] = {
    "enable_thinking": Switch(),  # Qwen 3, GLM 4.5, Nemotron, SmolLM 3, Gemma 4
    "thinking": Switch(),  # DeepSeek 3.1, Kimi K2, Granite, Hermes 4
    "preserve_thinking": Switch(),  # Qwen 3.6
    "clear_thinking": Switch(),  # GLM 4.7
    "keep_past_thinking": Switch(),  # LFM 2
    "truncate_history_thinking": Switch(),  # Nemotron 3
    "low_effort": Switch(),  # Nemotron 3
    "force_nonempty_content": Switch(),  # SGLang's reasoning parsers
    "add_vision_id": Switch(),  # Qwen-VL
    "thinking_mode": Switch(("enabled", "disabled", "adaptive")),  # MiniMax M3
    "thinking_effort": Switch(("low", "high", "max")),  # Kimi K3
    "thinking_budget": Switch((), -1, MAX_THINKING_TOKENS),  # Seed-OSS
    "reasoning_effort": EFFORT,  # gpt-oss, Mistral, Hunyuan
}


def check_template_switches(body: Mapping[str, Any]) -> None:
    """Check `chat_template_kwargs` and `reasoning_effort`. Raises BadRequest naming the parameter."""
    if "reasoning_effort" in body:
        _check("reasoning_effort", EFFORT, body["reasoning_effort"])
    for name, value in body.get("chat_template_kwargs", {}).items():
        where = f"chat_template_kwargs.{name[:64]}"
        switch = SWITCHES.get(name)
        if switch is None:
            raise UnsupportedParameter(f"{where}: only these can be set: {', '.join(SWITCHES)}.", param=where)
        _check(where, switch, value)


def _check(where: str, switch: Switch, value: Any) -> None:
    if not switch.takes(value):
        raise BadRequest(f"{where} must be {str(switch).replace('`', '')}.", param=where)
