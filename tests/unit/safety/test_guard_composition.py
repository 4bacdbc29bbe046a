"""What runs a guard model, and what is refused at start instead of being ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.runtime import _guard_template, build_guard_engine
from app.safety.guard_templates import FORMATS
from app.settings import Settings, SettingsError

LLAMA = FORMATS[0]


def died(_reason: str) -> None:
    """Nothing is started here that could."""


@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings(safety="off", safety_guard_model="meta-llama/Llama-Guard-3-1B")],
    ids=["none", "off"],
)
def test_no_guard_without_a_model_or_with_safety_off(settings: Settings) -> None:
    """The default has no guard."""
    assert build_guard_engine(settings, died) is None


def test_a_guard_beside_sglang_is_refused_until_it_can_run() -> None:
    """Two models do not fit one process: better no start than a guard that is not there."""
    with pytest.raises(SettingsError, match="one model per process"):
        build_guard_engine(Settings(safety_guard_model="meta-llama/Llama-Guard-3-1B"), died)


def test_a_model_that_is_no_guard_is_refused() -> None:
    """Its format is not known."""
    with pytest.raises(SettingsError, match="no guard model"):
        build_guard_engine(Settings(engine="scripted", safety_guard_model="gpt2"), died)


@pytest.mark.parametrize(
    ("files", "ours"),
    [
        ({"tokenizer_config.json": {}}, True),
        ({"tokenizer_config.json": {"chat_template": "x"}}, False),
        ({"tokenizer_config.json": {}, "chat_template.jinja": "x"}, False),
        ({}, False),
    ],
)
def test_the_checkpoints_own_template_goes_first(
    tmp_path: Path, files: dict[str, object], *, ours: bool
) -> None:
    """Ours is for a model on disk that has none."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    arguments = _guard_template(tmp_path, LLAMA, tmp_path)
    assert bool(arguments) == ours
    if ours:
        assert Path(arguments["chat_template"] or "").read_text("utf-8") == LLAMA.template
