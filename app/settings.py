"""Every setting, once: name, type, default, help.

The flag `--resume-grace-s`, the variable `TOKENRING_RESUME_GRACE_S`, the key
`resume_grace_s` of `tokenring.toml`, `--help` and docs/settings.md are all made from the
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

from app.core import TIERS

ENV_PREFIX = "TOKENRING_"
CONFIG_FILE = "tokenring.toml"
ENGINE_TABLES = ("sglang", "small", "guard")
"""Tables below `[engine]`, SGLang's arguments for the main model and the two beside it."""


EXIT_CONFIG = 78
"""`EX_CONFIG` of sysexits.h, the status of a process that its settings or its store keep from working.

A service manager does not start it again (deploy/systemd/tokenring.service).
"""


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

    host: str = _setting("127.0.0.1", "address to listen on; any but a loopback address requires an API key")
    port: int = _setting(8000, "port to listen on; 0 takes a free one", minimum=0, maximum=65_535)
    data_dir: Path = _setting(Path("data"), "directory of the store: conversations, the ledger, key hashes")
    purge_after_days: int = _setting(
        30, "days until a deleted conversation is purged; until then it can be restored", minimum=0
    )
    cors_origins: str = _setting("", "origins of web pages that may use the API, commas between; `*` is any")
    api_key: str = _setting(
        "",
        "an admin API key beside the stored ones; as a flag, every user of the machine can read it",
        secret=True,
    )
    api_key_file: str = _setting("", "file that holds the value of `api_key`")
    trusted_proxies: str = _setting(
        "",
        "addresses or networks of proxies whose `X-Forwarded-For` is believed, commas between",
    )
    proxy_user_header: str = _setting(
        "", "header in which those proxies name a signed-in person, as `X-Forwarded-Email`; empty is none"
    )
    oidc_issuer: str = _setting("", "URL of an OpenID Connect issuer where people sign in; empty is none")
    oidc_client_id: str = _setting("", "id of this server at the issuer")
    oidc_client_secret: str = _setting("", "its secret; empty for a public client", secret=True)
    oidc_client_secret_file: str = _setting("", "file that holds the value of `oidc_client_secret`")
    oidc_scope: str = _setting("openid profile email", "scopes that are asked for")
    oidc_require: str = _setting("", "claim that a person must have, as `groups=staff`; empty is none")
    oidc_admin: str = _setting("", "claim that makes a person an admin, as `groups=ops`; empty is none")
    oidc_session_hours: float = _setting(
        24.0, "hours until a person has to sign in again", minimum=0.01, maximum=8784
    )
    sign_in_tier: str = _setting("standard", "tier of a person who signs in first", choices=TIERS)
    sign_in_rpm: int = _setting(0, "the same for requests per minute; 0 is no limit", minimum=0)
    sign_in_tpm: int = _setting(0, "the same for tokens per minute; 0 is no limit", minimum=0)
    sign_in_budget_usd: float = _setting(
        0.0, "the same for the monthly budget in USD; 0 is none", minimum=0, maximum=10**9
    )
    model: str = _setting("", "model path or hub id; empty serves the built-in model")
    served_model_name: str = _setting("", "name of the model in requests; empty uses the model's own name")
    engine: str = _setting(
        "sglang",
        "engine that generates answers: in this process, in SGLang servers elsewhere, or a test engine",
        choices=("sglang", "remote", "scripted"),
    )
    remote_url: str = _setting("", "URLs of the SGLang servers, with commas between; all serve one model")
    remote_api_key: str = _setting("", "API key that those servers require", secret=True)
    remote_tokenizer: str = _setting("", "path or hub id of their tokenizer; empty is the path they report")
    remote_timeout_s: float = _setting(
        300.0, "seconds for which a remote server may be silent within an answer", minimum=1
    )
    remote_stall_s: float = _setting(60.0, "seconds of silence until a remote server is checked", minimum=1)
    remote_resume_s: float = _setting(300.0, "seconds that an answer waits for its lost server", minimum=0)
    small_model: str = _setting("", "path or hub id of a second, smaller model; see docs/routing.md")
    small_served_model_name: str = _setting("", "its name in requests; empty is the end of its path or id")
    degrade: str = _setting(
        "on",
        "whether high pressure shortens answers and moves some to the small model; see docs/routing.md",
        choices=("on", "off"),
    )
    degrade_short_tokens: int = _setting(512, "tokens of the longest answer while shortened", minimum=1)
    degrade_rise_s: float = _setting(2.0, "seconds of high pressure before each step up", minimum=0.1)
    degrade_fall_s: float = _setting(10.0, "seconds of low pressure before each step back down", minimum=0.1)
    tp: int = _setting(1, "GPUs (tensor parallel ranks) for the model; 0 is all that it can use", minimum=0)
    default_max_tokens: int = _setting(
        0, "longest answer in tokens without `max_tokens`; 0 is the rest of the context", minimum=0
    )
    engine_restarts: int = _setting(
        3,
        "restarts of the engine in `engine_restart_window_s`; after one more loss the server ends",
        minimum=0,
    )
    engine_restart_window_s: float = _setting(600.0, "seconds in which its restarts are counted", minimum=1)
    engine_hang_s: float = _setting(
        120.0, "seconds without progress after which the engine is restarted; 0 is never", minimum=0
    )
    engine_start_s: float = _setting(1800.0, "longest start of the engine in seconds; 0 is any", minimum=0)
    scripted: str = _setting("", 'answers of the scripted engine, as "rate=50,tokens=200,seed=1"')
    resume_grace_s: float = _setting(
        30.0,
        "seconds that a generation continues after its last client left, where the request says that it may"
        " return; 0 stops it at once",
        minimum=0,
    )
    abandon_grace_s: float = _setting(
        3.0, "the same for other requests; never longer than `resume_grace_s`", minimum=0
    )
    retention_s: float = _setting(
        300.0,
        "seconds that a finished stream stays in memory; an unstored one cannot be resumed later",
        minimum=0,
    )
    heartbeat_s: float = _setting(15.0, "seconds of silence before a stream sends a comment", minimum=0.01)
    stall_timeout_s: float = _setting(
        60.0, "seconds after which a client that reads nothing is disconnected", minimum=0.1
    )
    body_timeout_s: float = _setting(30.0, "seconds that a request body may take to arrive", minimum=0.1)
    strict_parameters: bool = _setting(
        default=False, help="whether parameters without effect are refused; see docs/parameters.md"
    )
    max_images: int = _setting(64, "images in a request with its conversation", minimum=0)
    max_image_pixels: int = _setting(
        32 * 1024**2,
        "pixels of one image, 3 bytes each once decoded; models scale images down to 1 to 13 million",
        minimum=1,
    )
    max_request_pixels: int = _setting(
        128 * 1024**2,
        "pixels of all images in a request with its conversation; ten of 12 million fit",
        minimum=1,
    )
    max_connections: int = _setting(
        0,
        "open connections; at the limit one that waits for no answer is closed, or else the new one is "
        "refused; 0 is the limit of open files (`ulimit -n`) less 32 to 256",
        minimum=0,
    )
    max_connections_per_address: int = _setting(
        0, "open connections of one address; 0 is no limit, for use behind a proxy", minimum=0
    )
    drain_timeout_s: float = _setting(
        30.0, "seconds for which streams may continue after SIGTERM before they are suspended", minimum=0
    )
    suspend_timeout_s: float = _setting(
        600.0,
        "seconds after a start within which suspended streams may be resumed; 0 suspends none",
        minimum=0,
    )
    max_body_bytes: int = _setting(
        0,
        "largest request body; 0 is 1 MiB and 16 bytes per token of context, and for a model that accepts "
        "images at least 32 MiB",
        minimum=0,
    )
    body_memory_bytes: int = _setting(
        512 * 1024**2,
        "memory for the bodies of all unanswered requests; a request that does not fit within 2 s is "
        "refused with 503",
        minimum=1024**2,
    )
    max_live_streams: int = _setting(20_000, "generations at once; more are refused with 503", minimum=1)
    max_queued_requests: int = _setting(
        2048, "requests that may wait for admission to the engine; more are refused with 503", minimum=1
    )
    max_queued_tokens: int = _setting(
        0, "KV tokens that waiting requests may need; 0 is four times the engine's capacity", minimum=0
    )
    queue_interactive_s: float = _setting(
        5.0, "seconds for which a request of tier interactive may wait for admission", minimum=0.1
    )
    queue_standard_s: float = _setting(10.0, "the same for tier standard", minimum=0.1)
    queue_batch_s: float = _setting(300.0, "the same for tier batch", minimum=0.1)
    ttft_target_s: float = _setting(
        2.0, "seconds to first token inside the engine that admission aims for", minimum=0.01
    )
    tpot_target_s: float = _setting(
        0.0,
        "seconds per output token that admission keeps by running fewer requests; 0 is no target",
        minimum=0.0,
        maximum=10.0,
    )
    key_slowdown: float = _setting(
        2.0,
        "factor by which a key with more than its share may slow down output tokens while other keys are in"
        " use; 0 is no limit",
        minimum=0.0,
        maximum=1000.0,
    )
    max_prefill_tokens: int = _setting(
        16_384, "uncached prompt tokens that may be pending in the engine at once", minimum=1
    )
    grammar_check_s: float = _setting(
        5.0,
        "CPU seconds to compile and try a caller's grammar; above it a grammar is refused",
        minimum=0.1,
        maximum=600,
    )
    grammar_mask_ms: float = _setting(
        2.0,
        "CPU milliseconds per token, on average, that a grammar may add to the engine's step; a burst may "
        "be 50 times as much; over it the request is refused or ended",
        minimum=0.1,
        maximum=1000,
    )
    isolation: str = _setting(
        "installation",
        "who shares cached prompts: all keys, or with `owner` the keys of one owner, so that the time to "
        "first token reveals no other owner's prompts",
        choices=("installation", "owner"),
    )
    max_reads_per_s: float = _setting(
        50.0,
        "reads per second of an owner's keys (lists, searches, views, exports, usage reports, models, "
        "stored answers), with bursts of ten seconds' worth; more are refused with 429; 0 is no limit",
        minimum=0.0,
    )
    stream_bytes: int = _setting(
        8 * 1024**2, "memory for the events of one stream; beyond it the older half is dropped", minimum=4096
    )
    retained_bytes: int = _setting(
        1024**3,
        "memory for finished streams; beyond it the oldest are dropped; while running streams take more, "
        "new requests are refused with 503",
        minimum=0,
    )
    safety: str = _setting(
        "on", "screening of prompts and answers; `observe` only records", choices=("on", "observe", "off")
    )
    safety_policy: str = _setting("", "path of the policy file; empty uses the built-in policy")
    safety_records_days: int = _setting(30, "days of safety records kept; 0 is none", minimum=0, maximum=3650)
    safety_fail_open: bool = _setting(
        default=False, help="whether a request passes unscreened where screening fails or takes too long"
    )
    safety_guard_model: str = _setting("", "path or hub id of a guard model that also judges prompts")
    safety_country: str = _setting("", "two-letter country of the help line in self-harm messages")
    safety_contact: str = _setting("", "address or URL that messages about refusals name for complaints")
    gpu_hour_usd: float = _setting(
        0.0,
        "US dollars for an hour of this server's GPUs, for the metrics; 0 is unknown",
        minimum=0,
    )
    otlp_endpoint: str = _setting("", "URL of an OpenTelemetry collector for traces; empty is off")
    log_level: str = _setting("info", "lowest severity logged", choices=("debug", "info", "warning", "error"))
    log_format: str = _setting(
        "auto",
        "format of log lines; `auto` is `console` on a terminal, otherwise `json`",
        choices=("auto", "json", "console"),
    )
    engine_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, metadata={"table": True})
    """Keys of `[engine.<name>]`, passed to that engine and checked by it."""
    prices: Sequence[Mapping[str, Any]] = field(default=(), metadata={"table": True})
    """The entries of `[[prices]]`, checked by app.metering.pricing."""

    @property
    def people_sign_in(self) -> bool:
        """True where people sign in, so that there is no open mode."""
        return bool(self.oidc_issuer or self.proxy_user_header)


def table() -> tuple[Setting, ...]:
    """All settings, in the order in which they are documented."""
    hints = get_type_hints(Settings)
    return tuple(
        Setting(f.name, hints[f.name], f.default, **f.metadata)
        for f in dataclasses.fields(Settings)
        if "help" in f.metadata
    )


def parse(setting: Setting, raw: object, where: str) -> Any:
    """`raw` as the setting's type. Raises SettingsError naming its place, `where`."""
    shown = "a value that is not shown" if setting.secret else repr(raw)
    try:
        value = _convert(setting.kind, raw)
    except (KeyError, TypeError, ValueError) as exc:
        kinds = {int: "a whole number", float: "a number", bool: "true or false"}
        raise SettingsError(f"{where}: expected {kinds.get(setting.kind, 'text')}, got {shown}") from exc
    if setting.choices and value not in setting.choices:
        raise SettingsError(f"{where}: expected one of {', '.join(setting.choices)}, got {shown}")
    if setting.minimum is not None and not value >= setting.minimum:
        raise SettingsError(f"{where}: must be at least {setting.minimum:g}, got {shown}")
    if setting.maximum is not None and value > setting.maximum:
        raise SettingsError(f"{where}: must be at most {setting.maximum:g}, got {shown}")
    return value


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
    flags: Mapping[str, object], environ: Mapping[str, str], config_file: Path | None = None
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
    for name in ("api_key", "oidc_client_secret"):
        values[name] = _secret(name, values.get(name, ""), values.get(f"{name}_file", ""))
    return Settings(**values)


def _secret(name: str, secret: str, path: str) -> str:
    """The secret of that name, from the setting or its file. Raises SettingsError."""
    if path:
        if secret:
            raise SettingsError(f"{name} and {name}_file are both set; set one of them")
        try:
            secret = Path(path).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise SettingsError(
                f"{name}_file {path}: {type(exc).__name__}; it must be readable text"
            ) from exc
        if not secret:
            raise SettingsError(f"{name}_file {path} is empty; write the secret into it")
    if any(char.isspace() or not char.isprintable() for char in secret):
        raise SettingsError(f"{name}: it must have no white space or control characters")
    return secret


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
