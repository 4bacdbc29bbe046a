"""A policy that observes: nothing is refused, watched or halted, and everything is recorded without text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.engine.scripted.engine import Script
from app.safety.policies.policy_prompt import STRICT
from app.store import safety_events, safety_records
from app.store.backup import transaction
from app.store.safety_records import SafetyRecord
from tests.support.screens import (
    BLOCKED,
    HARM,
    SEEN_LATE,
    WATCHED,
    WATCHED_LATE,
    SpeakingEngine,
    policy_file,
    speaking,
    word_models,
)
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import fetch, until

HARMFUL = f"{' '.join(f'fine{i}' for i in range(40))} {HARM} and {' '.join(f'word{i}' for i in range(80))}"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

Start = Callable[..., Any]


@pytest.fixture
def start(serve: Serve, tmp_path: Path) -> Start:
    """A server that observes, whose engine says a given text, and whose screens know words."""

    async def started(said: str = "all is well", **options: Any) -> Served:
        models = word_models(tmp_path / "models")
        return await serve(
            Script(),
            engine_type=speaking(said),
            load_models=lambda: models,
            **{"safety": "observe", **options},
        )

    return started


async def records_of(served: Served) -> list[SafetyRecord]:
    """What was recorded, oldest first, once it is written."""
    assert served.runtime.safety is not None
    served.runtime.safety.recorder.flush()
    await until(lambda: served.runtime.database.queue_depth == 0)
    return await served.runtime.database.read(lambda c: list(safety_records.records(c, 0, 99_999_999)))


async def texts_of(served: Served) -> dict[str, int]:
    """How many prompts and answers were counted."""
    await records_of(served)
    totals = await served.runtime.database.read(lambda c: safety_records.totals(c, 0, 99_999_999))
    counted: dict[str, int] = {}
    for total, texts in totals.items():
        counted[total.subject] = counted.get(total.subject, 0) + texts
    return counted


async def events_of(served: Served) -> int:
    """How many decisions the screens took."""
    await until(lambda: served.runtime.database.queue_depth == 0)
    page = await served.runtime.database.read(lambda c: safety_events.page(c, 100))
    return len(page.events)


@pytest.mark.parametrize(
    ("word", "action", "stage"),
    [
        (BLOCKED, "block", "encoder"),
        (SEEN_LATE, "block", "encoder"),
        (WATCHED, "watch", "encoder"),
        (WATCHED_LATE, "watch", "encoder"),
    ],
)
async def test_a_prompt_is_answered_and_recorded(start: Start, word: str, action: str, stage: str):
    """With what the policy says, by which category, at which score; the model is told nothing more."""
    served = await start()
    answer = await served.post(chat(f"{word} words", stream=False))
    assert answer.status == 200
    assert answer.json()["choices"][0]["message"]["content"] == "all is well"
    assert isinstance(served.engine, SpeakingEngine)
    assert all(message["content"] != STRICT for message in served.engine.prompts[-1])
    (record,) = await records_of(served)
    assert (record.subject, record.action, record.done, record.category) == ("prompt", action, None, "S2")
    assert (record.stage, record.key_id, record.again) == (stage, "", False)
    assert record.score >= record.threshold
    assert (record.length, record.role, record.script) == ("0-99", "user", "latin")
    assert word not in str(record)
    assert await texts_of(served) == {"prompt": 1, "answer": 1}
    assert await events_of(served) == 0
    assert served.runtime.safety_counters.observed[stage]["S2"][action] == 1


async def test_an_answer_is_whole_and_recorded(start: Start):
    """No token is dropped; the record is of the scores that would have halted it."""
    served = await start(HARMFUL)
    answer = (await served.post(chat(stream=False))).json()
    assert answer["choices"][0]["message"]["content"] == HARMFUL
    assert (answer["choices"][0]["finish_reason"], "moderation" in answer) == ("stop", False)
    (record,) = await records_of(served)
    assert (record.subject, record.stage, record.action, record.done) == ("answer", "stream", "block", None)
    assert record.category == "S2"
    assert served.runtime.safety_counters.observed["stream"]["S2"]["block"] == 1
    assert await events_of(served) == 0


async def test_what_nobody_minds_is_only_counted(start: Start):
    """A prompt and each choice of its answer."""
    served = await start()
    assert (await served.post(chat(stream=False, n=2))).status == 200
    assert await records_of(served) == []
    assert await texts_of(served) == {"prompt": 1, "answer": 2}


async def test_a_locked_category_is_refused_all_the_same(start: Start, tmp_path: Path, serve: Serve):
    """Child exploitation; so are spans of the hard list. The log says at start what is given up."""
    models = word_models(tmp_path / "models")
    prompts: Any = models.prompts
    prompts._full = prompts._fast = {"unspeakable": {"S4": 0.999}}
    policy = policy_file(tmp_path, mode="observe", hard_list=["Project Nightingale"])
    served = await serve(
        Script(),
        engine_type=speaking("it is called project nightingale, yes"),
        load_models=lambda: models,
        safety="on",
        safety_policy=policy,
    )
    refused = await served.post(chat("unspeakable words", stream=False))
    assert (refused.status, refused.json()["error"]["code"]) == (400, "content_filter")
    halted = (await served.post(chat("hello", stream=False))).json()
    assert halted["choices"][0]["finish_reason"] == "content_filter"
    records = await records_of(served)
    assert [(r.subject, r.stage, r.action, r.done) for r in records] == [
        ("prompt", "encoder", "block", "block"),
        ("answer", "hard_list", "block", "block"),
    ]
    assert await events_of(served) == 2
    (warning,) = [line for line in served.log if line["event"] == "policy_loosened"]
    assert "indiscriminate weapons" in warning["gives_up"][0]


async def test_a_later_turn_of_a_recorded_conversation_is_counted_apart(start: Start):
    """People would have stopped, or asked anew; its scores come from the same turn once more."""
    served = await start()
    turns = [{"role": "user", "content": f"{BLOCKED} words"}]
    for number in range(2):
        assert (await served.post({**chat(stream=False), "messages": turns})).status == 200
        turns = [
            *turns,
            {"role": "assistant", "content": "all is well"},
            {"role": "user", "content": f"and then {number}"},
        ]
    assert [record.again for record in await records_of(served)] == [False, True]


async def test_who_asks_is_told_what_the_policy_would_do(start: Start):
    """The moderation object flags what is not refused."""
    served = await start()
    body = chat(f"{BLOCKED} words", stream=False, moderation={"model": "omni-moderation-latest"})
    result = (await served.post(body)).json()["moderation"]["input"]["results"][0]
    assert (result["flagged"], result["categories"]["illicit"]) == (True, True)
    moderated = await served.call("POST", "/v1/moderations", {"input": f"{BLOCKED} words"})
    assert moderated.json()["results"][0]["flagged"]


async def test_an_enforcing_server_records_as_well(start: Start):
    """So that another policy can be compared with it; what was done is in the record."""
    served = await start(safety="on")
    assert (await served.post(chat(f"{BLOCKED} words", stream=False))).status == 400
    (record,) = await records_of(served)
    assert (record.action, record.done) == ("block", "block")
    assert await texts_of(served) == {"prompt": 1}
    assert await events_of(served) == 1


async def test_without_days_nothing_is_recorded(start: Start):
    """`safety_records_days` 0."""
    served = await start(safety_records_days=0)
    assert (await served.post(chat(f"{BLOCKED} words", stream=False))).status == 200
    assert await records_of(served) == []
    assert await texts_of(served) == {}


@pytest.mark.parametrize(
    ("server", "level", "status"),
    [
        ("on", "observe", 200),
        ("on", "standard", 400),
        ("observe", "standard", 200),
        ("observe", "enforce", 400),
        ("observe", "strict", 400),
    ],
)
async def test_a_key_has_the_level_that_its_operator_gave_it(
    start: Start, server: str, level: str, status: int
):
    """Looser or stricter than the server's; a change is in force at once, and only an admin key makes it."""
    served = await start(safety=server)
    made = (await served.call("POST", "/api/admin/keys", {"name": "admin", "scope": "admin"})).json()
    admin = {"authorization": f"Bearer {made['key']}"}
    made = (await served.call("POST", "/api/admin/keys", {"name": "clinic"}, **admin)).json()
    own = {"authorization": f"Bearer {made['key']}"}
    path = f"/api/admin/keys/{made['id']}"
    assert (await served.call("PATCH", path, {"safety": level}, **own)).status == 403
    assert (await served.call("PATCH", path, {"safety": level}, **admin)).json()["safety"] == level
    answer = await served.post(chat(f"{BLOCKED} words", stream=False), **own)
    assert answer.status == status
    (record,) = [r for r in await records_of(served) if r.subject == "prompt"]
    assert (record.key_id, record.action, record.done) == (
        made["id"],
        "block",
        "block" if status == 400 else None,
    )


async def test_a_report_is_printed_beside_the_server(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Of what was recorded so far: what was let pass, and what would have been refused."""
    served = await start()
    for text in (f"{BLOCKED} words", "all is well", "how are you"):
        assert (await served.post(chat(text, stream=False))).status == 200
    await records_of(served)
    data_dir = str(served.runtime.settings.data_dir)
    assert main(["safety", "report", "--data-dir", data_dir, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prompts"], report["answers"], report["records"]) == (3, 3, 1)
    refused = {policy["name"]: policy["prompts"]["refused"] for policy in report["policies"]}
    assert (refused["recorded"], refused["observe"], refused["enforce"]) == (1, 0, 1)
    [category] = report["by"]["category"]
    assert (category["value"], category["prompts"]["refused"]) == ("S2", 1)


async def test_records_are_written_when_the_server_stops(start: Start):
    """Also those of the last second."""
    served = await start()
    assert (await served.post(chat(f"{BLOCKED} words", stream=False))).status == 200
    data_dir = served.runtime.settings.data_dir
    await served.runtime.aclose()
    with transaction(data_dir) as connection:
        [record] = safety_records.records(connection, 0, 99_999_999)
    assert record.action == "block"


async def test_images_are_refused_by_name(start: Start, tmp_path: Path):
    """If the policy says so, whatever its mode: nobody reads them."""
    served = await start(safety="on", safety_policy=policy_file(tmp_path, images="refuse"))
    body = chat(stream=False)
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, IMAGE]}]
    answer = await served.post(body)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "images_refused")
    assert "messages[0]" in answer.json()["error"]["message"]
    assert (await served.post(chat(stream=False))).status == 200
    observing = {"safety": "observe", "safety_policy": policy_file(tmp_path, images="refuse")}
    assert (await (await start(**observing)).post(body)).status == 400
    allowed = await (await start(safety="on")).post(body)
    assert allowed.json()["error"]["code"] == "unsupported_content", "the scripted engine reads no images"


@pytest.mark.parametrize(("rules", "images"), [({}, "allow"), ({"images": "refuse"}, "refuse")])
async def test_the_list_of_models_says_what_becomes_of_images(
    start: Start, tmp_path: Path, rules: dict[str, str], images: str
):
    """Of a model that reads them; of another there is nothing to say."""
    served = await start(safety_policy=policy_file(tmp_path, **rules))
    [entry] = (await served.call("GET", "/api/models")).json()["data"]
    assert entry["images"] is None
    engine: Any = served.engine
    engine._card = replace(engine._card, capabilities=frozenset({"vision"}))
    [entry] = (await served.call("GET", "/api/models")).json()["data"]
    assert entry["images"] == images


async def test_the_policy_in_force_is_shown(start: Start, tmp_path: Path):
    """To admins: whether it observes, and the hash of each level."""
    served = await start(safety_policy=policy_file(tmp_path, images="refuse"))
    policy = (await served.call("GET", "/api/admin/safety")).json()["policy"]
    assert (policy["mode"], policy["images"]) == ("observe", "refuse")
    assert policy["level_hashes"]["standard"] == policy["level_hashes"]["observe"] == policy["hash"]
    assert len(set(policy["level_hashes"].values())) == 3
    metrics = (await fetch(served.port, "GET", "/metrics")).body.decode()
    assert "tokenring_safety_observed_total" in metrics
