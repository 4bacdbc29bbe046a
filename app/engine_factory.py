"""The choice of a model's engine by the settings: the only module that imports them all."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from app.core import Engine
from app.engine.grammar.cost import GrammarBudget
from app.engine.request_limits import ImageLimits
from app.engine.scripted.engine import Script, ScriptedEngine
from app.engine.sglang.allowed_args import check
from app.engine.sglang.args import SGLangOptions, with_ranks
from app.engine.sglang.platform import prepare_process
from app.engine.supervise import RestartLimits, SupervisedEngine
from app.routing.router import AUTO
from app.safety.counters import SafetyCounters
from app.safety.guard.templates import GuardFormat, format_of
from app.safety.guard.tier import Guard, GuardTier
from app.settings import Settings, SettingsError

_CHILD_START_S = 1800.0
"""The longest time for a child to load its model; one that fails does so long before."""

CONFIGS = ("config.json", "params.json")
"""The file that makes a folder a model: transformers' name for it, and Mistral's."""
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
"""An id on the hub: a name, or an owner and a name. Anything that begins with `/`, `.` or `~` is a path."""

GUARD_ARGS: Mapping[str, str | None] = {"reasoning_parser": None, "tool_call_parser": None}
"""A guard's server has no parser: with one for reasoning, SGLang admits words before it holds to a regex."""

OnDeath = Callable[[str], None]


def build_engine(settings: Settings, on_death: OnDeath) -> Engine:
    """The engine the settings ask for, not yet started. Raises SettingsError."""
    check_models(settings)
    if settings.engine == "scripted":
        name = settings.served_model_name or "scripted"
        return ScriptedEngine(Script.parse(settings.scripted), name=name, on_death=on_death)
    if settings.engine == "remote":
        return _remote_engine(settings)
    # Imported here, not above: the scripted engine must start without torch.
    from app.engine.sglang.engine import SGLangEngine

    limits = RestartLimits(
        settings.engine_restarts,
        settings.engine_restart_window_s,
        settings.engine_hang_s,
        settings.engine_start_s,
    )
    return SGLangEngine(sglang_options(settings), on_death=on_death, limits=limits)


def sglang_options(settings: Settings) -> SGLangOptions:
    """The options of the main model's engine in this process, or on another node."""
    return SGLangOptions(
        model=settings.model,
        served_model_name=settings.served_model_name,
        tp=settings.tp,
        grammar_mask_ms=settings.grammar_mask_ms,
        grammar_check_s=settings.grammar_check_s,
        server_args=settings.engine_args.get("sglang", {}),
        default_max_tokens=settings.default_max_tokens or sys.maxsize,
        images=ImageLimits(settings.max_images, settings.max_image_pixels, settings.max_request_pixels),
    )


def check_models(settings: Settings) -> None:
    """Raise SettingsError for a model that is a path to nothing, before anybody asks a hub for it."""
    for name, model in models_of(settings).items():
        path = Path(model)
        is_seen = os.access(path, os.R_OK)
        if "://" in model or (is_seen and (path.is_file() or any((path / f).is_file() for f in CONFIGS))):
            continue
        if is_seen:
            raise SettingsError(f"{name}: the folder {path} has no {CONFIGS[0]}, so it has no model.")
        if not HUB_ID.fullmatch(model):
            raise SettingsError(
                f"{name}: there is no folder {path} that this user can see; give the path of a model's folder"
                " (in a container: as it is mounted there), or the id of a model on the hub."
            )


def models_of(settings: Settings) -> Mapping[str, str]:
    """The models that SGLang loads on this machine, by the setting that names each."""
    main = {"model": settings.model} if settings.engine == "sglang" else {}
    small = "" if settings.small_model.partition(":")[0] == "scripted" else settings.small_model
    guard = "" if settings.safety == "off" else settings.safety_guard_model
    named = {**main, "small_model": small, "safety_guard_model": guard}
    return {name: model for name, model in named.items() if model}


def _remote_engine(settings: Settings) -> Engine:
    """The model of the servers at `remote_url`. Raises SettingsError."""
    from app.engine.http.engine import RemoteEngine, parse_urls
    from app.engine.http.pool import RemoteOptions
    from app.engine.http.server import Timeouts
    from app.engine.sglang.remote import RemoteModelOptions, load_remote_model

    model = RemoteModelOptions(
        served_model_name=settings.served_model_name,
        tokenizer=settings.remote_tokenizer,
        grammars=GrammarBudget(settings.grammar_check_s, settings.grammar_mask_ms),
        default_max_tokens=settings.default_max_tokens or sys.maxsize,
    )
    options = RemoteOptions(
        urls=parse_urls(settings.remote_url),
        api_key=settings.remote_api_key,
        timeouts=Timeouts(silence_s=settings.remote_timeout_s),
        resume_s=settings.remote_resume_s,
        stall_s=settings.remote_stall_s,
    )
    return RemoteEngine(options, lambda facts: load_remote_model(facts, model))


def build_small_engine(settings: Settings) -> SupervisedEngine | None:
    """The engine of the second model, not yet started; None without one. Raises SettingsError.

    A child of this process, or, where `small_model` is `scripted` or `scripted:SHAPE`, a scripted engine.
    """
    if not settings.small_model:
        return None
    kind, _, shape = settings.small_model.partition(":")
    name = _small_name(settings)
    check_names(_large_name(settings), name)
    if kind == "scripted":
        script = Script.parse(shape)
        return SupervisedEngine(name, lambda on_exit: ScriptedEngine(script, name=name, on_death=on_exit))
    options = _small_options(settings)
    return SupervisedEngine(name, lambda on_exit: child_engine(options, on_exit, settings))


def names_of(settings: Settings) -> list[str]:
    """The names of the models in requests, as far as the settings give them; nothing is loaded."""
    names = [_large_name(settings), _small_name(settings) if settings.small_model else ""]
    return [name for name in names if name]


def _small_options(settings: Settings) -> SGLangOptions:
    return SGLangOptions(
        model=settings.small_model,
        served_model_name=settings.small_served_model_name,
        server_args=settings.engine_args.get("small", {}),
        default_max_tokens=settings.default_max_tokens or sys.maxsize,
        table="small",
        grammar_mask_ms=settings.grammar_mask_ms,
        grammar_check_s=settings.grammar_check_s,
    )


def _small_name(settings: Settings) -> str:
    """The name of the small model, which the settings have."""
    if settings.small_model.partition(":")[0] == "scripted":
        return settings.small_served_model_name or "scripted-small"
    return _small_options(settings).name


def _large_name(settings: Settings) -> str:
    """The main model's name, as far as the settings give it."""
    if settings.served_model_name or settings.engine == "remote":
        return settings.served_model_name
    if settings.engine == "scripted":
        return "scripted"
    return SGLangOptions(model=settings.model).name


def check_names(large: str, small: str) -> None:
    """Raise SettingsError unless requests can tell two models apart."""
    if small == large:
        raise SettingsError(
            f"both models are called {large!r}; give the small one another name: small_served_model_name"
        )
    if AUTO in (small, large):
        raise SettingsError(
            f"with a small model {AUTO!r} is the name that leaves the choice to the server; give the model of"
            " that name another: served_model_name, small_served_model_name"
        )


def check_child_args(settings: Settings) -> None:
    """Raise SettingsError for what is wrong in `[engine.small]` and `[engine.guard]`.

    Imports SGLang where anything is in them.
    """
    models = {"small": settings.small_model, "guard": settings.safety_guard_model}
    for table, model in models.items():
        args = settings.engine_args.get(table)
        if args and model:
            prepare_process()
            options = SGLangOptions(model=model, server_args=args, table=table)
            check(args, options.where)
            with_ranks(options)


def child_engine(options: SGLangOptions, on_exit: OnDeath, settings: Settings) -> Engine:
    """A model beside this process's own, in a server that is started, watched and stopped here."""
    from app.engine.child_server import ChildServer
    from app.engine.http.engine import RemoteEngine
    from app.engine.http.pool import RemoteOptions
    from app.engine.sglang.child import child_command
    from app.engine.sglang.remote import RemoteModelOptions, load_remote_model

    def exited(reason: str) -> None:
        engine.child_ended()
        on_exit(reason)

    key = secrets.token_hex(16)  # other users of the machine have no way in
    model = RemoteModelOptions(
        default_max_tokens=options.default_max_tokens,
        grammars=GrammarBudget(options.grammar_check_s, options.grammar_mask_ms),
    )
    child = ChildServer(lambda port: child_command(options, key, port), on_exit=exited)
    remote = RemoteOptions(
        api_key=key,
        start_s=_CHILD_START_S,
        resume_s=settings.remote_resume_s,
        stall_s=settings.remote_stall_s,
        continues_by_ids=True,
    )
    engine = RemoteEngine(remote, lambda facts: load_remote_model(facts, model), child)
    return engine


def build_guard_engine(settings: Settings, on_death: OnDeath) -> Engine | None:
    """The engine of the guard model, not yet started; None without one. Raises SettingsError.

    Here and nowhere else is decided what runs a guard. `app.safety.guard.tier` knows the protocol alone.
    """
    if not settings.safety_guard_model or settings.safety == "off":
        return None
    form = format_of(settings.safety_guard_model)
    options = SGLangOptions(
        model=settings.safety_guard_model,
        server_args={
            **settings.engine_args.get("guard", {}),
            **GUARD_ARGS,
            "chat_template": str(_guard_template(form, settings.data_dir)),
        },
        table="guard",
    )
    if settings.engine != "scripted":  # SGLang runs one model per process
        return child_engine(options, on_death, settings)
    from app.engine.sglang.engine import SGLangEngine

    return SGLangEngine(options, on_death=on_death)


def _guard_template(form: GuardFormat, data_dir: Path) -> Path:
    """The format's chat template as a file, for the guard's server."""
    data_dir.mkdir(parents=True, exist_ok=True)
    path = data_dir / "guard_template.jinja"
    path.write_text(form.template, "utf-8")
    return path


def build_guard(settings: Settings, engine: Engine, counters: SafetyCounters) -> GuardTier:
    """The guard tier over the engine of `build_guard_engine`, once that has started."""
    guard = Guard(engine, format_of(settings.safety_guard_model))
    return GuardTier(guard, counters, fail_open=settings.safety_fail_open)


def model_path(settings: Settings) -> str | None:
    """The path or hub id of the main model's tokenizer, where it has one that this process knows."""
    if settings.engine == "scripted":
        return None
    if settings.engine == "remote":
        return settings.remote_tokenizer or None
    return SGLangOptions(model=settings.model).model_path
