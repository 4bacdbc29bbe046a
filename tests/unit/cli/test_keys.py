"""`tokenring keys`: what it prints and where, what it refuses, a store that is not there yet."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import EXIT_USAGE, main, parser
from app.core import Key, KeyTerms
from app.store import keys
from app.store.backup import transaction
from app.store.opening import lock, note_models
from tests.support.commands import without_store

TEXT = re.compile(r"(tr-[0-9a-f]{12})-[0-9a-f]{64}\n")
ID = re.compile(r"tr-[0-9a-f]{12}")
LIMITS = ("--rpm", "60", "--tpm", "9000", "--max-streams", "2", "--budget-usd", "2.50", "--tier", "batch")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `keys` over a store of its own: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run_(*argv: str) -> tuple[int, str, str]:
        status = main(["keys", *argv, "--data-dir", str(tmp_path / "data")])
        out, err = capsys.readouterr()
        return status, out, without_store(err)

    return run_


def stored(tmp_path: Path) -> list[Key]:
    """The keys that the store has."""
    with transaction(tmp_path / "data") as connection:
        return keys.all_keys(connection)


def made(run: Run, *argv: str) -> dict[str, Any]:
    """A key as `create --json` prints it."""
    status, out, err = run("create", *argv, "--json")
    assert status == 0
    assert all(line.startswith("tokenring: warning: ") for line in err.splitlines())
    key: dict[str, Any] = json.loads(out)
    return key


def test_a_key_is_printed_alone(run: Run, tmp_path: Path):
    """Standard output is the key; that it is the first is said beside it."""
    status, out, err = run("create", "--name", "laptop", *LIMITS)
    match = TEXT.fullmatch(out)
    assert match is not None
    assert status == 0
    assert match[1] in err
    assert "first key" in err
    assert out.strip() not in err
    [key] = stored(tmp_path)
    assert key.terms == KeyTerms(
        "laptop", tier="batch", rpm=60, tpm=9000, max_streams=2, budget_micro_usd=2_500_000
    )
    status, _, err = run("create", "--name", "other")
    assert "first key" not in err


def test_a_key_as_json(run: Run, tmp_path: Path):
    """With --json it is one object with the id, the key and all that was asked for."""
    key = made(
        run,
        "--name",
        "ops",
        "--scope",
        "admin",
        "--models",
        "a, b",
        "--expires",
        "2099-01-01",
        "--owner",
        "ann",
    )
    assert key["key"].startswith(f"{key['id']}-")
    assert (key["scope"], key["models"], key["owner"], key["status"]) == (
        "admin",
        ["a", "b"],
        "ann",
        "active",
    )
    assert key["expires_at"] == 4_070_908_800
    last = made(run, "--name", "x", *LIMITS)
    assert {stored_key.owner for stored_key in stored(tmp_path)} == {"ann", last["id"]}


def test_the_list_shows_no_secret(run: Run):
    """Every key is a line with its tier and limits; secrets are not shown."""
    first = made(run, "--name", "laptop", "--rpm", "1000", "--tier", "batch")
    second = made(run, "--name", "two words", "--owner", "ann", "--models", "m")
    run("revoke", second["id"])
    status, out, _ = run("list")
    head, *rows = out.splitlines()
    assert status == 0
    assert head.split()[:4] == ["id", "name", "owner", "scope"]
    assert [ID.findall(row) for row in rows] == [[first["id"]], [second["id"]]]
    assert "rpm 1,000" in rows[0]
    assert "revoked" in rows[1]
    assert rows[0].split().count("batch") == 1
    listed = run("list", "--json")[1]
    for key in (first, second):
        assert key["key"].rpartition("-")[2] not in out + listed
    assert [key["status"] for key in json.loads(listed)["data"]] == ["active", "revoked"]


def test_a_rotation(run: Run, tmp_path: Path):
    """It prints the new key, and says how long the old one lasts: a day, or not at all."""
    key = made(run, "--name", "laptop")
    status, out, err = run("rotate", key["id"])
    assert (status, TEXT.fullmatch(out) is not None, out.strip() != key["key"]) == (0, True, True)
    assert "86,400 s more" in err
    assert len(stored(tmp_path)[0].secrets) == 2
    last = json.loads(run("rotate", key["id"], "--overlap-s", "0", "--json")[1])
    assert last["old_secrets_end_at"] is None
    [secret] = stored(tmp_path)[0].secrets
    assert secret.digest == keys.digest_of(last["key"].encode())


def test_an_expiry_can_be_put_off(run: Run):
    """A key ends now, at a time, or never."""
    key_id = made(run, "--name", "laptop")["id"]
    assert run("expire", key_id)[0] == 0
    assert json.loads(run("list", "--json")[1])["data"][0]["status"] == "expired"
    later = json.loads(run("expire", key_id, "--at", "2099-01-01T18:00Z", "--json")[1])
    assert (later["status"], later["expires_at"]) == ("active", 4_070_973_600)
    assert run("expire", key_id, "--at", "never")[1] == f"{key_id} does not expire.\n"
    assert "2099-01-01T00:00Z" in run("expire", key_id, "--at", "2099-01-01")[1]


def test_a_key_is_changed(run: Run, tmp_path: Path):
    """What flags name is changed, `none` takes a limit away, and all else stays as it was."""
    key_id = made(run, "--name", "laptop", "--models", "a", "--safety", "strict", *LIMITS)["id"]
    more = ("--degrade", "off", "--grammars", "schemas", "--resume", "always")
    status, out, _ = run("update", key_id, "--weight", "2.5", "--rpm", "none", "--models", "none", *more)
    limits = "weight 2.5, strict safety, never degraded, schemas only, always resumable"
    assert (status, limits in out, "rpm" in out) == (0, True, False)
    [key] = stored(tmp_path)
    assert key.terms == KeyTerms(
        "laptop",
        tier="batch",
        weight=2.5,
        tpm=9000,
        max_streams=2,
        budget_micro_usd=2_500_000,
        safety="strict",
        degrade="off",
        grammars="schemas",
        resume="always",
    )
    flags = ("--name", "desk", "--tier", "interactive", "--weight", "1", "--budget-usd", "none")
    changed = json.loads(run("update", key_id, *flags, "--json")[1])
    assert (changed["name"], changed["tier"], changed["weight"]) == ("desk", "interactive", 1.0)
    assert (changed["budget_usd"], changed["tpm"]) == (None, 9000)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["revoke", "tr-000000000000"], "no key"),
        (["rotate", "tr-000000000000"], "no key"),
        (["create", "--name", ""], "name must have"),
        (["create", "--name", "a", "--rpm", "0"], "rpm must be"),
        (["create", "--name", "a", "--weight", "0"], "weight must be at least 0.1"),
        (["update", "tr-000000000000", "--weight", "2"], "no key"),
        (["update", "tr-000000000000", "--weight", "nan"], "weight must be"),
        (["update", "tr-000000000000", "--name", "none", "--tpm", "-1"], "tpm must be"),
        (["update", "tr-000000000000"], "Nothing to change"),
        (["create", "--name", "a", "--budget-usd", "free"], "budget_usd must be"),
        (["create", "--name", "a", "--budget-usd", "1.0000001"], "at most 6 decimals"),
        (["create", "--name", "a", "--models", "a,,b"], "models[1]"),
        (["create", "--name", "a", "--expires", "2020-01-01"], "past"),
        (["create", "--name", "a", "--expires", "soon"], "expires_at must be"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(run: Run, tmp_path: Path, argv: list[str], words: str):
    """A wrong argument ends the command with status 2 and one line, and makes no key."""
    made(run, "--name", "first")
    status, out, err = run(*argv)
    assert (status, out, len(err.splitlines())) == (EXIT_USAGE, "", 1)
    assert words in err
    assert len(stored(tmp_path)) == 1


@pytest.mark.parametrize("argv", [["list"], ["revoke", "tr-0"]])
def test_only_create_makes_a_store(run: Run, tmp_path: Path, argv: list[str]):
    """Without a store there is nothing to list or revoke, and none is made."""
    status, _, err = run(*argv)
    assert (status, "has no store" in err) == (EXIT_USAGE, True)
    assert not (tmp_path / "data").exists()
    run("create", "--name", "first")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_a_store_is_made_only_where_it_was_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Without a word about where, nothing is made: a key in a store that no server reads opens nothing."""
    monkeypatch.chdir(tmp_path)
    create = ["keys", "create", "--name", "laptop"]
    assert main(create) == EXIT_USAGE
    err = capsys.readouterr().err
    assert f"no store in {tmp_path / 'data'}" in err
    assert "--data-dir" in err
    assert "--init" in err
    assert list(tmp_path.iterdir()) == []
    assert main([*create, "--init"]) == 0
    assert TEXT.fullmatch(capsys.readouterr().out) is not None
    assert main(create) == 0, "there is one now"


def test_which_store_and_which_server_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """On standard error: the file, and whether a server runs on it, which then sees the key."""
    data_dir = tmp_path / "data"
    create = ["keys", "create", "--name", "laptop", "--data-dir", str(data_dir)]
    main(create)
    err = capsys.readouterr().err
    assert f"the store is {data_dir / 'tokenring.db'}; no server runs on it" in err
    with lock(data_dir):
        main(create)
        err = capsys.readouterr().err
        assert f"a server runs on it (process {os.getpid()}) and sees a change within a second" in err
        main(["usage", "--json", "--data-dir", str(data_dir)])
        out, err = capsys.readouterr()
    assert json.loads(out)["object"] == "usage"
    assert err == (
        f"tokenring: the store is {data_dir / 'tokenring.db'}; a server runs on it (process {os.getpid()})\n"
    )


def test_what_a_key_names_and_is_not_there_is_told(run: Run, tmp_path: Path):
    """A model that is not served, a budget without a price: the key is made, with a warning."""
    status, out, err = run("create", "--name", "a", "--models", "tokenring-builtin,tpyo")
    assert (status, TEXT.fullmatch(out) is not None) == (0, True)
    assert "warning: No model is called 'tpyo': the settings name 'tokenring-builtin'" in err
    key_id = out[:15]
    with lock(tmp_path / "data") as held:
        note_models(held, ["llama"])
        err = run("update", key_id, "--budget-usd", "5")[2]
    assert "'tokenring-builtin' is in the settings, but the server has not loaded it" in err
    assert "No model is called 'tpyo': the server has loaded 'llama'" in err
    assert "The budget does not bound" in run("create", "--name", "b", "--budget-usd", "5")[2]
    assert "warning" not in run("create", "--name", "c")[2]


def test_the_examples_of_the_docs_are_commands():
    """Each `tokenring keys` line of docs/keys.md is one that the command line takes."""
    text = (Path(__file__).parents[3] / "docs/keys.md").read_text("utf-8")
    lines = re.findall(r"^tokenring (keys .*)$", text, re.MULTILINE)
    assert len(lines) >= 9
    for line in lines:
        parser().parse_args(shlex.split(line, comments=True))


def test_a_key_has_a_level_of_safety(run: Run, tmp_path: Path):
    """`--safety` is stored and listed, and can be changed; no level is without safety."""
    assert made(run, "--name", "class", "--safety", "strict")["safety"] == "strict"
    assert made(run, "--name", "staff")["safety"] == "standard"
    assert [key.terms.safety for key in stored(tmp_path)] == ["strict", "standard"]
    assert "strict safety" in run("list")[1].splitlines()[1]
    key_id = made(run, "--name", "clinic", "--safety", "enforce")["id"]
    assert json.loads(run("update", key_id, "--safety", "observe", "--json")[1])["safety"] == "observe"
    assert "observe safety" in run("list")[1].splitlines()[3]
    with pytest.raises(SystemExit):
        run("create", "--name", "none", "--safety", "off")
