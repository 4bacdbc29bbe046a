"""Every setting, once: name, type, default, help.

The flag `--resume-grace-s`, the variable `TOKENRING_RESUME_GRACE_S`, the key
`resume_grace_s` of `tokenring.toml`, `--help` and the README table all come from the
fields of `Settings`. A flag beats a variable, a variable beats the file, the file beats
the default. An unknown or malformed setting is an error at start, never ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

ENV_PREFIX = "TOKENRING_"
CONFIG_FILE = "tokenring.toml"
ENGINE_TABLES = ("sglang", "small", "guard")
"""Tables below `[engine]`, SGLang's arguments for the main model and the two beside it."""


class SettingsError(Exception):
    """A setting is unknown or malformed; the message names it and says what to do."""


class Setting(NamedTuple):
    """One entry of the table."""

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


def _setting(
    default: Any,
    help: str,  # noqa: A002  # the word every settings table uses
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
) -> Any:
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "secret": secret}
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in force. Times are seconds, sizes bytes."""

    host: str = _setting("127.0.0.1", "address to listen on; anything but loopback needs an API key")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", minimum=0, maximum=65_535)
    data_dir: Path = _setting(Path("data"), "directory for what the server keeps: conversations, the ledger")
    purge_after_days: int = _setting(
        30, "days after which a deleted conversation can no longer be restored", minimum=0
    )
    api_key: str = _setting(
        "",
        "one more API key beside the stored ones, with admin scope; as a flag every user of the machine can"
        " read it",
        secret=True,
    )
    api_key_file: str = _setting("", "file that has it instead")
    model: str = _setting("", "model path or hub id; empty serves the built-in model")
    served_model_name: str = _setting("", "name of the model in requests; empty takes the model's own")
    engine: str = _setting("sglang", "which engine generates", choices=("sglang", "remote", "scripted"))
    remote_url: str = _setting(
        "", "SGLang servers that `engine = remote` asks, all with one model, as URLs with commas between"
    )
    remote_api_key: str = _setting("", "the key that those servers ask for", secret=True)
    remote_tokenizer: str = _setting(
        "", "path or hub id of their model's tokenizer and configuration; empty takes the path they name"
    )
    remote_timeout_s: float = _setting(
        300.0, "how long a remote server may be silent in the middle of an answer", minimum=1
    )
    small_model: str = _setting(
        "",
        "a second, smaller model, as path or hub id, in a server that this process runs; see docs/routing.md",
    )
    small_served_model_name: str = _setting(
        "", "its name in requests; empty takes the last part of its path or id"
    )
    degrade: str = _setting(
        "on",
        "whether answers become shorter, and go to the small model, while too much waits",
        choices=("on", "off"),
    )
    degrade_short_tokens: int = _setting(512, "how long answers are then at most, in tokens", minimum=1)
    degrade_rise_s: float = _setting(
        2.0, "how long too much must wait before less is done, at each step", minimum=0.1
    )
    degrade_fall_s: float = _setting(
        10.0, "how long little must wait before more is done again, at each step", minimum=0.1
    )
    tp: int = _setting(
        1, "GPUs (tensor parallel ranks) to spread the model over; 0 takes all it sees", minimum=0
    )
    default_max_tokens: int = _setting(
        0, "longest answer to a request without `max_tokens`; 0 leaves it the rest of the context", minimum=0
    )
    scripted: str = _setting("", 'shape of the scripted engine, as "rate=50,tokens=200,seed=1"')
    resume_grace_s: float = _setting(
        30.0,
        "how long a generation goes on after its last client left; 0 stops it at once",
        minimum=0,
    )
    retention_s: float = _setting(300.0, "how long a finished stream can still be attached to", minimum=0)
    heartbeat_s: float = _setting(15.0, "a silent stream sends a comment line this often", minimum=0.01)
    stall_timeout_s: float = _setting(
        60.0, "a client that reads nothing for this long is dropped", minimum=0.1
    )
    body_timeout_s: float = _setting(30.0, "how long a request body may take to arrive", minimum=0.1)
    max_images: int = _setting(
        64, "images in one request with its conversation, where the model sees", minimum=0
    )
    max_image_pixels: int = _setting(
        32 * 1024**2,
        "pixels of one image: decoded it takes three bytes for each, and models scale down what is over 1 to"
        " 13 million",
        minimum=1,
    )
    max_request_pixels: int = _setting(
        128 * 1024**2,
        "pixels of all images of a request with its conversation: ten photographs of 12 million",
        minimum=1,
    )
    max_connections: int = _setting(
        0,
        "open connections; over it the longest idle is closed, and where all wait for answers the new one"
        " refused;"
        " 0 is as many as there are files (ulimit -n), less an eighth for the rest",
        minimum=0,
    )
    max_connections_per_address: int = _setting(
        0, "the same for each address; 0 sets no bound, as behind a proxy all have one", minimum=0
    )
    drain_timeout_s: float = _setting(
        30.0, "after SIGTERM, how long streams may finish before they are ended", minimum=0
    )
    max_body_bytes: int = _setting(
        0,
        "largest request body; 0 takes what the models can use: 1 MiB and 16 bytes per token of context,"
        " and at least 32 MiB where one sees images",
        minimum=0,
    )
    body_memory_bytes: int = _setting(
        512 * 1024**2,
        "memory that bodies of requests which are not answered yet may take together; more wait 2 s and are"
        " refused with 503",
        minimum=1024**2,
    )
    max_live_streams: int = _setting(20_000, "generations at once; more are refused with 503", minimum=1)
    max_queued_requests: int = _setting(
        2048,
        "requests that may wait for room in the engine; more are refused with 503",
        minimum=1,
    )
    max_queued_tokens: int = _setting(
        0, "KV tokens that waiting requests may need together; 0 is four times the engine's pool", minimum=0
    )
    queue_interactive_s: float = _setting(
        5.0, "how long a request of a key of tier interactive may wait for room", minimum=0.1
    )
    queue_standard_s: float = _setting(10.0, "the same for tier standard", minimum=0.1)
    queue_batch_s: float = _setting(300.0, "the same for tier batch", minimum=0.1)
    ttft_target_s: float = _setting(
        2.0, "time to the first token in the engine that admission aims at", minimum=0.01
    )
    tpot_target_s: float = _setting(
        0.0,
        "time per output token that admission keeps to, by having fewer requests answered at once; 0 is none",
        minimum=0.0,
        maximum=10.0,
    )
    key_slowdown: float = _setting(
        2.0,
        "how many times longer an output token may take because of one key that has more than its share,"
        " while other keys are in use; 0 is any",
        minimum=0.0,
        maximum=1000.0,
    )
    max_prefill_tokens: int = _setting(
        16_384, "uncached prompt tokens that the engine may have before it at once", minimum=1
    )
    grammar_check_s: float = _setting(
        5.0,
        "CPU time that compiling a caller's grammar and walking it ahead may take; more is refused",
        minimum=0.1,
        maximum=600,
    )
    grammar_mask_ms: float = _setting(
        2.0,
        "CPU time per token that a grammar may take of the engine's step, in milliseconds, with 50 times as"
        " much at once; more is refused, or ended",
        minimum=0.1,
        maximum=1000,
    )
    isolation: str = _setting(
        "installation",
        "who shares cached prompts: all keys, or with `owner` those of one owner, so that nobody can tell"
        " from the time to the first token what others have asked",
        choices=("installation", "owner"),
    )
    max_reads_per_s: float = _setting(
        50.0,
        "lists, searches, views, exports, usage reports, models and stored answers that the keys of one owner"
        " may ask for in a second, ten seconds' worth at once; more are refused with 429; 0 is no limit",
        minimum=0.0,
    )
    stream_bytes: int = _setting(
        8 * 1024**2, "memory one stream's ring may take before its oldest events go", minimum=4096
    )
    retained_bytes: int = _setting(
        1024**3,
        "memory finished streams may take before the oldest go; running ones over it: 503",
        minimum=0,
    )
    safety: str = _setting(
        "on", "whether prompts and answers are screened; see docs/safety.md", choices=("on", "off")
    )
    safety_policy: str = _setting("", "policy file; empty takes the built-in policy")
    safety_fail_open: bool = _setting(
        default=False,
        help="lets a request pass unscreened when a screen fails or takes too long, instead of refusing it",
    )
    safety_guard_model: str = _setting(
        "", "guard model that judges prompts too, as path or hub id; empty has none"
    )
    safety_country: str = _setting(
        "", "two-letter country whose help line self-harm messages name; empty names none"
    )
    log_level: str = _setting(
        "info", "least severe log line written", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _setting(
        "auto", "`json`, `console`, or `auto`: console on a terminal", choices=("auto", "json", "console")
    )
    engine_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, metadata={"table": True})
    """Keys of `[engine.<name>]`, passed to that engine and checked by it."""
    prices: Sequence[Mapping[str, Any]] = field(default=(), metadata={"table": True})
    """The entries of `[[prices]]`, checked by app.metering.pricing."""


def table() -> tuple[Setting, ...]:
    """All settings, in the order in which they are documented."""
    hints = get_type_hints(Settings)
    return tuple(
        Setting(f.name, hints[f.name], f.default, **f.metadata)
        for f in dataclasses.fields(Settings)
        if "help" in f.metadata
    )


def parse(setting: Setting, raw: object, where: str) -> Any:
    """`raw` as the setting's type. Raises SettingsError naming `where` it came from."""
    try:
        value = _convert(setting.kind, raw)
    except (KeyError, TypeError, ValueError) as exc:
        expected = {int: "a whole number", float: "a number", bool: "true or false"}
        raise SettingsError(
            f"{where}: expected {expected.get(setting.kind, 'text')}, got {_shown(setting, raw)}"
        ) from exc
    if setting.choices and value not in setting.choices:
        raise SettingsError(
            f"{where}: expected one of {', '.join(setting.choices)}, got {_shown(setting, raw)}"
        )
    if setting.minimum is not None and not value >= setting.minimum:
        raise SettingsError(f"{where}: must be at least {setting.minimum:g}, got {_shown(setting, raw)}")
    if setting.maximum is not None and value > setting.maximum:
        raise SettingsError(f"{where}: must be at most {setting.maximum:g}, got {_shown(setting, raw)}")
    return value


def _shown(setting: Setting, raw: object) -> str:
    return "a value that is not shown" if setting.secret else repr(raw)


def _convert(kind: type, raw: object) -> Any:
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        return {"true": True, "1": True, "false": False, "0": False}[str(raw).lower()]
    if isinstance(raw, bool):
        raise TypeError(raw)
    if kind in (str, Path) and not isinstance(raw, str | Path):
        raise TypeError(raw)
    if kind is int and isinstance(raw, float):
        raise TypeError(raw)
    if kind is float and not math.isfinite(value := float(cast("str | float", raw))):
        raise ValueError(value)
    return kind(raw)


def unknown(name: str, names: Iterable[str], where: str) -> SettingsError:
    """The error for a name that is no setting, with the nearest one that is."""
    near = difflib.get_close_matches(name, list(names), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return SettingsError(f"{where}: unknown setting {name!r}{hint}")


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_file: Path | None = None,
) -> Settings:
    """Settings from flags, `TOKENRING_*` variables and the config file.

    `config_file` None reads `tokenring.toml` of the working directory if there is one.
    Raises SettingsError.
    """
    values: dict[str, Any] = {}
    settings = {s.name: s for s in table()}
    values.update(_read_file(config_file, settings))
    values.update(_read_environ(environ, settings))
    for name, raw in flags.items():
        values[name] = parse(settings[name], raw, settings[name].flag)
    values["api_key"] = _api_key(values.get("api_key", ""), values.get("api_key_file", ""))
    return Settings(**values)


def _api_key(key: str, path: str) -> str:
    """The key as clients send it, from the setting or its file. Raises SettingsError."""
    if path:
        if key:
            raise SettingsError("api_key and api_key_file are both set; set one of them")
        try:
            key = Path(path).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise SettingsError(
                f"api_key_file {path}: {type(exc).__name__}; it must be readable text"
            ) from exc
        if not key:
            raise SettingsError(f"api_key_file {path} is empty; write the key into it")
    if any(char.isspace() or not char.isprintable() for char in key):
        raise SettingsError("api_key: no client can send white space or control characters in a key")
    return key


def _read_environ(environ: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    values = {}
    names = {s.env: s for s in settings.values()}
    for variable, raw in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable not in names:
            raise unknown(variable, names, "environment")
        values[names[variable].name] = parse(names[variable], raw, variable)
    return values


def _read_file(path: Path | None, settings: Mapping[str, Setting]) -> dict[str, Any]:
    if path is None:
        path = Path(CONFIG_FILE)
        if not path.exists():
            return {}
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise SettingsError(f"{path}: {exc}") from exc
    values: dict[str, Any] = {"prices": _prices(document.pop("prices", []), path)}
    if isinstance(document.get("engine"), dict):  # otherwise the setting of that name
        values["engine_args"] = _engine_args(document.pop("engine"), path)
    for name, raw in document.items():
        if isinstance(raw, dict):
            raise unknown(name, [*settings, "engine", "prices"], f"{path}: table [{name}]")
        if name not in settings:
            raise unknown(name, [*settings, "engine", "prices"], str(path))
        values[name] = parse(settings[name], raw, f"{path}: {name}")
    return values


def _engine_args(tables: Mapping[str, Any], path: Path) -> Mapping[str, Mapping[str, Any]]:
    for name, args in tables.items():
        if name not in ENGINE_TABLES or not isinstance(args, dict):
            raise unknown(f"engine.{name}", [f"engine.{t}" for t in ENGINE_TABLES], str(path))
    return tables


def _prices(entries: object, path: Path) -> Sequence[Mapping[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError(f"{path}: prices: begin each entry with a line [[prices]]")
    return tuple(entries)
