"""The measure of the built-in model: which names an answer mentions, and what makes it right."""

import json
from pathlib import Path

import pytest

from scripts.training.builtin_model import evaluate
from scripts.training.builtin_model.scoring import Question, Scorer, Verdict, read_questions

CHAT = "/api/chat/completions"
STREAM = f"{CHAT}/{{id}}"


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    """Scorer with the product's vocabulary."""
    return Scorer.of_product()


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("Run `scripts/serve`.", {"scripts/serve"}),
        ("Run scripts/serve --model /models/my-model.", {"scripts/serve", "--model"}),
        ("Start it with `python -m app serve --port 9000`.", {"tokenring serve", "--port"}),
        (f"Send `POST {CHAT}`.", {f"POST {CHAT}"}),
        (f"curl -N http://127.0.0.1:8000{CHAT} -d '{{}}'", {CHAT}),
        (f"Send a DELETE request to `{CHAT}/chatcmpl-12ab`.", {f"DELETE {STREAM}"}),
        (f"curl -X DELETE http://localhost:8000{CHAT}/$ID", {f"DELETE {STREAM}"}),
        (f"`POST {CHAT}/<id>/cancel` stops it.", {f"POST {STREAM}/cancel"}),
        (f"`GET {CHAT}/ID?last_event_id=7`", {f"GET {STREAM}", "last_event_id"}),
        ("Set base_url to http://127.0.0.1:8000/v1.", {"base_url", "/v1"}),
        ("Send the last-event-id header.", {"Last-Event-ID"}),
        ("`scripts/serve --engine=scripted`", {"scripts/serve", "--engine scripted"}),
        ("`--data-dir /healthz`", {"--data-dir"}),
        ('Write `port = 9000` in tokenring.toml, or `model = "x"`.', {"port", "model", "tokenring.toml"}),
        (
            "Set `resume_grace_s`, or TOKENRING_RESUME_GRACE_S.",
            {"resume_grace_s", "TOKENRING_RESUME_GRACE_S"},
        ),
        ("A `: ping` line is a heartbeat; [DONE] is the end.", {": ping", "[DONE]"}),
        ('Add "stream": true to the body.', {"stream"}),
        ("Pass stream=True and set `stop`.", {"stream", "stop"}),
        ("Open `/` in a browser.", {"/"}),
    ],
)
def test_finds_the_names(scorer: Scorer, answer: str, names: set[str]) -> None:
    """Each spelling of a name is found, the longest name wins, and nothing else is found."""
    assert scorer.mentions(answer) == (names, set())


@pytest.mark.parametrize(
    "answer",
    [
        "I stop the stream when you use tools; the model and the host of the port are fine.",
        "Hello! I'm the little model in Tokenring, and tokenring is well today.",
        "It is a read/write and/or stop-and-go matter: the heartbeat: pinging on.",
        "Keep it in /mnt/big/disk or ./data, either is fine.",
    ],
)
def test_plain_words_are_no_names(scorer: Scorer, answer: str) -> None:
    """English words that are also names do not count unless they are marked as code."""
    assert scorer.mentions(answer) == (set(), set())


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("Run scripts/start.", "scripts/start"),
        ("Run scripts/serve-all.", "scripts/serve-all"),
        ("GET `/api/streams`.", "/api/streams"),
        (f"Call {CHAT}/abc/resume now.", f"{STREAM}/resume"),
        (f"Call {CHAT}/resume now.", f"{CHAT}/resume"),
        (f"`DELETE {CHAT}` stops it.", CHAT),
        (f"`POST {STREAM}` attaches.", STREAM),
        ("See /health for that.", "/health"),
        ("Pass --gpus 2.", "--gpus"),
        ("Pass --modelname.", "--modelname"),
        ("Send X-Resume-From.", "X-Resume-From"),
        ("Send the `Resume-Token` header.", "Resume-Token"),
        ("Set TOKENRING_SECRET.", "TOKENRING_SECRET"),
        ("Set `resume_wait_s`.", "resume_wait_s"),
        ("Write config.yaml.", "config.yaml"),
        ("Run `python -m app start`.", "python -m app start"),
        ("Run `tokenring start`.", "tokenring start"),
    ],
)
def test_finds_invented_names(scorer: Scorer, answer: str, name: str) -> None:
    """What looks like a command, flag, route, header or setting and is none is reported as unknown."""
    assert name in scorer.mentions(answer)[1]


def ask(*right: list[str], allowed: tuple[str, ...] = ()) -> Question:
    """Question that wants one name of each group."""
    return {"question": "?", "right": list(right), "allowed": list(allowed)}


def test_an_alternative_of_each_group_is_enough(scorer: Scorer) -> None:
    """One name of every group makes an answer right; a group without one is reported missing."""
    question = ask(["--port", "port"], ["scripts/serve"])
    assert scorer.judge(question, "scripts/serve --port 81").right
    assert scorer.judge(question, "--port 81") == Verdict(missing=(("scripts/serve",),), wrong=())


def test_a_further_name_is_wrong_unless_allowed(scorer: Scorer) -> None:
    """A name of the product that the question does not allow makes the answer wrong."""
    answer = "Run `scripts/serve --port 81`."
    assert scorer.judge(ask(["--port"]), answer) == Verdict(missing=(), wrong=("scripts/serve",))
    assert scorer.judge(ask(["--port"], allowed=("scripts/serve",)), answer).right


def test_an_invented_name_is_wrong_beside_the_right_one(scorer: Scorer) -> None:
    """The right name does not make up for an invented one."""
    assert scorer.judge(ask(["--port"]), "Use --port or --listen.").wrong == ("--listen",)


def test_the_plumbing_of_a_request_is_harmless(scorer: Scorer) -> None:
    """A content type, a method alone or curl's own options are never wrong."""
    answer = (
        "curl --no-buffer --header 'Content-Type: application/json' --data @body /v1/models, a GET or POST"
    )
    assert scorer.judge(ask(["/v1/models"]), answer).right


def test_silence_is_not_right(scorer: Scorer) -> None:
    """An empty answer is right for no question."""
    assert not any(scorer.judge(question, "").right for question in read_questions())


def test_every_question_can_be_answered(scorer: Scorer) -> None:
    """There are 40 different questions; each name that answers one is judged right when written out."""
    questions = read_questions()
    assert len({question["question"] for question in questions}) == 40
    for question in questions:
        (group,) = question["right"]
        for name in group:
            assert scorer.judge(question, _written(name)).right, name


def test_every_allowed_name_is_in_the_vocabulary(scorer: Scorer) -> None:
    """A question allows only names that the scorer can find."""
    names = {name.name for name in scorer.names}
    assert {name for question in read_questions() for name in question["allowed"]} <= names


def test_the_report_counts_and_hides_the_questions() -> None:
    """The score counts right answers; questions and answers show up only when asked for."""
    results = evaluate.measure(lambda _: "Run `scripts/test`.")
    right = sum("scripts/test" in question["right"][0] for question in read_questions())
    assert evaluate.count_right(results) == right == 1
    hidden = evaluate.report_table(results, show=False) + evaluate.report_json(results, show=False)
    shown = evaluate.report_table(results, show=True) + evaluate.report_json(results, show=True)
    assert "1 of 40" in hidden
    assert json.loads(evaluate.report_json(results, show=False))["right"] == 1
    for question in read_questions():
        assert question["question"] not in hidden
        assert question["question"] in shown


def test_a_missing_model_is_an_error_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model `--local` ends with status 2 and says where it looked."""
    assert evaluate.main(["--local", "--model-dir", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def _written(name: str) -> str:
    return f'{name} = "1"' if name in {"port", "host", "model", "tp"} else f"`{name}`"
