"""What runs a guard model, and what is refused at start instead of being ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine_factory import _guard_template, build_guard_engine
from app.safety.guard.templates import FORMATS
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


def test_a_model_that_is_no_guard_is_refused() -> None:
    """Its format is not known."""
    with pytest.raises(SettingsError, match="no guard model"):
        build_guard_engine(Settings(engine="scripted", safety_guard_model="gpt2"), died)


def test_a_guards_server_has_our_template(tmp_path: Path) -> None:
    """Whatever its checkpoint brings: only ours can ask about an answer."""
    path = _guard_template(LLAMA, tmp_path / "data")
    assert path.read_text("utf-8") == LLAMA.template
