"""`chat_template_kwargs` and `reasoning_effort`: what a caller may set of a model's chat template.

Every name that a template reads can be set so, and what a template prints may stand before the operator's
words: special tokens, dates, tools. So there are switches only, in values that are no text of a caller's.
They are those that templates of the models that SGLang serves read; a model heeds its own and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.schema.fields import BOOL, Field, read
from app.errors import UnsupportedParameter

EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts of SGLang's request model, and `no_think` of Hunyuan's template."""
EFFORT = Field((str, int, float), 0, 1, choices=EFFORTS)
SWITCHES: Mapping[str, Field] = {
    "enable_thinking": BOOL,  # Qwen 3, GLM 4.5, Nemotron, SmolLM 3, Gemma 4
    "thinking": BOOL,  # DeepSeek 3.1, Kimi K2, Granite, Hermes 4
    "preserve_thinking": BOOL,  # Qwen 3.6
    "clear_thinking": BOOL,  # GLM 4.7
    "keep_past_thinking": BOOL,  # LFM 2
    "truncate_history_thinking": BOOL,  # Nemotron 3
    "low_effort": BOOL,  # Nemotron 3
    "force_nonempty_content": BOOL,  # SGLang's reasoning parsers
    "add_vision_id": BOOL,  # Qwen-VL
    "thinking_mode": Field((str,), choices=("enabled", "disabled", "adaptive")),  # MiniMax M3
    "thinking_effort": Field((str,), choices=("low", "high", "max")),  # Kimi K3
    "thinking_budget": Field((int,), -1, 1_000_000),  # Seed-OSS
    "reasoning_effort": EFFORT,  # gpt-oss, Mistral, Hunyuan
}


def check_template_switches(switches: Mapping[str, Any]) -> None:
    """Check `chat_template_kwargs`. Raises BadRequest and UnsupportedParameter naming the switch."""
    for name, value in switches.items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name not in SWITCHES:
            raise UnsupportedParameter(f"{where}: only these can be set: {', '.join(SWITCHES)}.", param=where)
        read(value, where, SWITCHES[name])
