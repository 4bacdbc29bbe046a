"""Which engine the settings make, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from app.engine.http.engine import RemoteEngine, parse_urls
from app.engine.scripted.engine import ScriptedEngine
from app.engine.sglang.engine import SGLangEngine
from app.engine.supervise import RestartLimits
from app.engine_factory import build_engine, build_guard_engine, build_small_engine
from app.settings import Settings, SettingsError


def died(reason: str) -> None:
    """Nobody listens."""


def test_a_remote_engine_is_made_of_its_urls() -> None:
    """One or several, with or without a slash at the end."""
    engine = build_engine(Settings(engine="remote", remote_url="http://a:30000/, https://b"), died)
    assert isinstance(engine, RemoteEngine)
    assert engine._options.urls == ("http://a:30000", "https://b")


def test_remote_and_child_servers_have_the_times_that_are_set() -> None:
    """How long an answer waits for a server, and how long one may be silent."""
    times = {"remote_resume_s": 7.0, "remote_stall_s": 8.0}
    remote = build_engine(Settings(engine="remote", remote_url="http://a", **times), died)
    small = build_small_engine(Settings(small_model="x/y", **times))
    assert small is not None
    for engine in (remote, small.engine):
        assert isinstance(engine, RemoteEngine)
        assert (engine._options.resume_s, engine._options.stall_s) == (7.0, 8.0)


def test_the_engine_of_this_process_has_the_limits_that_are_set() -> None:
    """How often it is started again, and how long it may be silent, or start."""
    settings = Settings(
        engine_restarts=5, engine_restart_window_s=60.0, engine_hang_s=7.0, engine_start_s=80.0
    )
    engine = build_engine(settings, died)
    assert isinstance(engine, SGLangEngine)
    assert engine._limits == RestartLimits(restarts=5, window_s=60.0, hang_s=7.0, start_s=80.0)


@pytest.mark.parametrize(
    "text", ["", " , ", "a:30000", "ftp://a", "http://", "http://user:pw@a", "http://a?x=1"]
)
def test_what_is_no_server_is_refused(text: str) -> None:
    """The message does not repeat what may hold a password."""
    with pytest.raises(SettingsError, match=r"^remote_url: [^@]*$"):
        parse_urls(text)


def test_a_guard_beside_a_model_of_this_process_is_a_child() -> None:
    """SGLang runs one model per process."""
    engine = build_guard_engine(Settings(safety_guard_model="meta-llama/Llama-Guard-3-1B"), died)
    assert isinstance(engine, RemoteEngine)


def test_the_small_model_is_a_child_where_there_is_one() -> None:
    """The default has none."""
    assert build_small_engine(Settings()) is None
    small = build_small_engine(Settings(small_model="x/y"))
    assert small is not None
    assert small.name == "y"
    assert isinstance(small.engine, RemoteEngine)


@pytest.mark.parametrize("engine", ["sglang", "remote", "scripted"])
def test_a_scripted_small_model_stands_beside_any_engine(engine: str) -> None:
    """Shaped as `--scripted` is, after a colon."""
    small = build_small_engine(Settings(engine=engine, small_model="scripted:tokens=5,context=64"))
    assert small is not None
    made = small.engine
    assert isinstance(made, ScriptedEngine)
    assert (made.model.id, made.model.context_length) == ("scripted-small", 64)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "a/same", "small_model": "b/same"},
        {"engine": "scripted", "small_model": "scripted", "small_served_model_name": "scripted"},
        {"engine": "remote", "served_model_name": "x", "small_model": "b/x"},
        {"small_model": "b/x", "small_served_model_name": "auto"},
        {"small_model": "b/x", "served_model_name": "auto"},
    ],
)
def test_two_models_need_two_names(settings: dict[str, str]) -> None:
    """And neither may have the name of the choice between them."""
    with pytest.raises(SettingsError, match="small_served_model_name"):
        build_small_engine(Settings(**settings))
