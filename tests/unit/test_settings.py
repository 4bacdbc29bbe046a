"""Settings: where a value comes from, what is refused, what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import settings
from app.settings import Settings, SettingsError, load

TOML = """
port = 1111
resume_grace_s = 5
log_level = "debug"

[engine.sglang]
mem_fraction_static = 0.8

[[prices]]
model = "*"
input = 0.5
output = "1.5"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file."""
    path = tmp_path / "tokenring.toml"
    path.write_text(TOML)
    return path


def test_defaults_without_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With no flag, variable or file the defaults hold."""
    monkeypatch.chdir(tmp_path)
    assert load({}, {}) == Settings()


def test_file_beats_default(file: Path):
    """The file's keys are in force, and its engine table is passed on."""
    loaded = load({}, {}, file)
    assert (loaded.port, loaded.resume_grace_s, loaded.log_level) == (1111, 5.0, "debug")
    assert loaded.engine_args == {"sglang": {"mem_fraction_static": 0.8}}
    assert loaded.prices == ({"model": "*", "input": 0.5, "output": "1.5"},)
    assert isinstance(loaded.resume_grace_s, float)


def test_the_engine_can_be_named_in_the_file(tmp_path: Path):
    """`engine` as a key is the setting, as a table its arguments."""
    path = tmp_path / "tokenring.toml"
    path.write_text('engine = "scripted"')
    assert load({}, {}, path).engine == "scripted"


def test_file_of_the_working_directory_is_read(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a path, tokenring.toml of the working directory counts."""
    monkeypatch.chdir(file.parent)
    assert load({}, {}).port == 1111


def test_variable_beats_file(file: Path):
    """A TOKENRING_ variable beats the file."""
    assert load({}, {"TOKENRING_PORT": "2222", "PORT": "9"}, file).port == 2222


def test_flag_beats_variable(file: Path):
    """A flag beats the variable."""
    assert load({"port": "3333"}, {"TOKENRING_PORT": "2222"}, file).port == 3333


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("port", "eighty"),
        ("port", "80.5"),
        ("port", ""),
        ("port", "-1"),
        ("port", "65536"),
        ("resume_grace_s", "soon"),
        ("resume_grace_s", "-0.1"),
        ("resume_grace_s", "nan"),
        ("resume_grace_s", "inf"),
        ("heartbeat_s", "0"),
        ("stream_bytes", "4095"),
        ("engine", "vllm"),
        ("log_level", "INFO"),
        ("tp", "-1"),
    ],
)
def test_malformed_values_are_refused_by_name(name: str, raw: str):
    """A malformed value is an error that names where it came from, and repeats it."""
    with pytest.raises(SettingsError) as error:
        load({}, {f"TOKENRING_{name.upper()}": raw})
    assert f"TOKENRING_{name.upper()}" in str(error.value)
    assert repr(raw) in str(error.value)
    with pytest.raises(SettingsError, match="--" + name.replace("_", "-")):
        load({name: raw}, {})


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("prot = 1", "'prot'; did you mean 'port'"),
        ("port = true", "port"),
        ("port = 80.5", "port"),
        ('resume_grace_s = "soon"', "resume_grace_s"),
        ("model = 7", "model"),
        ("[serve]\nport = 1", r"table \[serve\]"),
        ("[engine.vllm]\nx = 1", "engine.vllm"),
        ("[engine]\nsglang = 1", "engine.sglang"),
        ("[prices]\nmodel = 1", r"\[\[prices\]\]"),
        ("prices = [1]", r"\[\[prices\]\]"),
        ("[[price]]\nmodel = 1", "did you mean 'prices'"),
        ("port = ", "tokenring.toml"),
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, toml: str, words: str):
    """An unknown key, a wrong type or broken TOML is an error that names the place."""
    path = tmp_path / "tokenring.toml"
    path.write_text(toml)
    with pytest.raises(SettingsError, match=words):
        load({}, {}, path)


def test_missing_file_is_an_error_when_named(tmp_path: Path):
    """A settings file that was asked for must be there."""
    with pytest.raises(SettingsError, match="nowhere"):
        load({}, {}, tmp_path / "nowhere.toml")


def test_file_that_is_not_text_is_an_error(tmp_path: Path):
    """A file that is not UTF-8 is refused in words, not with a traceback."""
    path = tmp_path / "tokenring.toml"
    path.write_bytes(b"port = \xff")
    with pytest.raises(SettingsError, match=r"tokenring\.toml"):
        load({}, {}, path)


def test_unknown_variable_suggests_the_nearest():
    """A mistyped variable is refused, with the one that was meant."""
    with pytest.raises(SettingsError, match="did you mean 'TOKENRING_API_KEY'"):
        load({}, {"TOKENRING_APIKEY": "secret-value"})


def test_secret_is_never_shown():
    """The key appears in no representation, table or error."""
    secret = "s3cret-value"
    loaded = load({}, {"TOKENRING_API_KEY": secret})
    assert loaded.api_key == secret
    assert secret not in repr(loaded)
    setting = next(s for s in settings.table() if s.name == "api_key")
    with pytest.raises(SettingsError) as error:
        settings.parse(setting._replace(kind=int), secret, "TOKENRING_API_KEY")
    assert secret not in str(error.value)


def test_every_setting_has_a_flag_a_variable_and_help():
    """The table is complete: unique names, a sentence each, a default that passes its own check."""
    table = settings.table()
    assert len({s.flag for s in table}) == len(table)
    for setting in table:
        assert setting.help
        assert setting.env.startswith("TOKENRING_")
        assert settings.parse(setting, setting.default, "default") == setting.default


def test_settings_cannot_be_changed():
    """Settings in force are frozen."""
    with pytest.raises(AttributeError):
        Settings().port = 1


@pytest.mark.parametrize("key", ["two words", " front", "end\n", "tab\t", "nul\0", "wide\u3000"])
def test_an_api_key_that_nobody_can_send_is_refused(key: str):
    """White space and control characters in the key are an error at start, which does not show it."""
    with pytest.raises(SettingsError, match="white space") as error:
        load({}, {"TOKENRING_API_KEY": key})
    assert key not in str(error.value)


def test_the_api_key_is_read_from_a_file(tmp_path: Path):
    """The file's line end is not the key's; a file that is not there, empty, or one of two is an error."""
    path = tmp_path / "key"
    path.write_text("s3cret\n")
    assert load({"api_key_file": str(path)}, {}).api_key == "s3cret"
    with pytest.raises(SettingsError, match="both"):
        load({"api_key_file": str(path)}, {"TOKENRING_API_KEY": "k"})
    path.write_text("\n")
    for missing in (path, tmp_path / "none"):
        with pytest.raises(SettingsError, match="api_key_file"):
            load({"api_key_file": str(missing)}, {})
