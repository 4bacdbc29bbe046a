"""POST /moderations over a real socket: OpenAI's shape, its SDK, batches, limits, and a free loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from app.api.schema.moderations import MAX_CHARS, MAX_INPUTS
from app.safety.categories import OPENAI_KEYS
from app.safety.classifiers.bundled_models import Models
from tests.support.policies import WordClassifier, write_models
from tests.support.screens import WordModel, WordReviewer
from tests.support.servers import Serve, Served
from tests.support.sse_client import request_bytes, until

PATHS = ["/api/moderations", "/v1/moderations"]
SCORES = {"bomb": {"S9": 0.99}, "kill": {"S1": 0.45}, "doxx": {"S7": 0.99}}


@pytest.fixture
async def served(serve: Serve, tmp_path: Path) -> Served:
    """A server whose screen knows some words."""
    return await screened(serve, tmp_path, WordClassifier(SCORES))


async def screened(serve: Serve, tmp_path: Path, classifier: WordClassifier) -> Served:
    """A server whose prompts this classifier judges."""
    models = Models(classifier, WordModel(), WordReviewer(), write_models(tmp_path / "models"))
    return await serve(safety="on", load_models=lambda: models)


async def moderated(
    served: Served, given: Any, path: str = PATHS[0], **parameters: Any
) -> list[dict[str, Any]]:
    """The results for an input."""
    answer = await served.call("POST", path, {"input": given, **parameters})
    assert answer.status == 200, answer.body
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


@pytest.mark.parametrize("path", PATHS)
async def test_the_answer_has_openais_shape(served: Served, path: str) -> None:
    """Id, model and one result, with every key of OpenAI's in every map."""
    answer = (await served.call("POST", path, {"input": "a bomb"})).json()
    assert answer["id"].startswith("modr-")
    assert answer["model"] == "tokenring-moderation"
    (result,) = answer["results"]
    assert result["flagged"] is True
    assert result["watched"] is True
    for name in ("categories", "category_scores", "category_applied_input_types"):
        assert set(OPENAI_KEYS) <= set(result[name])
    assert result["categories"]["illicit/violent"] is True
    assert max(result["category_scores"].values()) == pytest.approx(0.99)


async def test_what_openai_has_no_name_for_has_ours(served: Served) -> None:
    """Privacy is a key beside OpenAI's."""
    (result,) = await moderated(served, "doxx them")
    assert result["category_scores"]["privacy"] == pytest.approx(0.99)
    assert [key for key, over in result["categories"].items() if over] == ["privacy"]


async def test_a_batch_keeps_its_order(served: Served) -> None:
    """A result for each of forty texts, in their order."""
    texts = [f"{number} {'bomb' if number % 3 == 0 else 'bread'}" for number in range(40)]
    results = await moderated(served, texts)
    assert [result["flagged"] for result in results] == [number % 3 == 0 for number in range(40)]


async def test_the_lower_threshold_is_watched_alone(served: Served) -> None:
    """Neither is the word for it wrong in the batch beside one that is blocked."""
    blocked, watched, clean = await moderated(served, ["bomb", "kill", "bake"])
    assert [r["flagged"] for r in (blocked, watched, clean)] == [True, False, False]
    assert [r["watched"] for r in (blocked, watched, clean)] == [True, True, False]


async def test_parts_are_one_text(served: Served) -> None:
    """What stands in two text parts is read together."""
    (result,) = await moderated(served, [{"type": "text", "text": "a"}, {"type": "text", "text": "bomb"}])
    assert result["flagged"] is True


async def test_an_empty_text_is_harmless(served: Served) -> None:
    """There is nothing to score in it."""
    (result,) = await moderated(served, "")
    assert (result["flagged"], max(result["category_scores"].values())) == (False, 0.0)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REFUSED = {
    "nothing": ({}, 400, "missing_parameter", "input"),
    "null": ({"input": None}, 400, "missing_parameter", "input"),
    "a number": ({"input": 5}, 400, "invalid_type", "input"),
    "an empty array": ({"input": []}, 400, "invalid_value", "input"),
    "a number in an array": ({"input": ["a", 5]}, 400, "invalid_type", "input[1]"),
    "a text among parts": ({"input": [{"type": "text", "text": "a"}, "b"]}, 400, "invalid_type", "input[1]"),
    "a part without text": ({"input": [{"type": "text"}]}, 400, "invalid_type", "input[0].text"),
    "an image": ({"input": [IMAGE]}, 400, "unsupported_content", "input[0].type"),
    "another model": ({"input": "a", "model": "gpt-4"}, 404, "model_not_found", "model"),
    "another parameter": ({"input": "a", "user": "me"}, 400, "unknown_parameter", "user"),
    "too many texts": ({"input": ["a"] * (MAX_INPUTS + 1)}, 400, "invalid_value", "input"),
    "too much text": ({"input": ["a" * MAX_CHARS, "b"]}, 400, "invalid_value", "input"),
    "too much text, six bytes a letter": (
        {"input": ["\u4e2d" * MAX_CHARS, "b"]},
        400,
        "invalid_value",
        "input",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_classified_is_refused(served: Served, case: str) -> None:
    """The error names the place and says what to do."""
    body, status, code, param = REFUSED[case]
    answer = await served.call("POST", PATHS[0], body)
    assert (answer.status, answer.error()["code"], answer.error()["param"]) == (status, code, param)


async def test_with_safety_off_nothing_is_said(serve: Serve) -> None:
    """No result is made up where nothing looks at the text, and clients do not try again."""
    server = await serve(safety="off")
    answer = await server.call("POST", PATHS[0], {"input": "bomb"})
    assert (answer.status, answer.error()["code"]) == (503, "safety_unavailable")
    assert answer.headers["x-should-retry"] == "false"


async def test_a_screen_that_breaks_is_an_error_not_a_result(serve: Serve, tmp_path: Path) -> None:
    """Fail closed, and without a word of the text."""

    def break_it(text: str) -> None:
        raise RuntimeError(text)

    served = await screened(serve, tmp_path, WordClassifier(before=break_it))
    answer = await served.call("POST", PATHS[0], {"input": "canary-31"})
    assert (answer.status, answer.error()["code"]) == (503, "safety_unavailable")
    assert "canary-31" not in f"{answer.body!r}{served.log}"


async def test_a_batch_does_not_hold_up_the_loop(serve: Serve, tmp_path: Path) -> None:
    """While texts are read in the thread, other requests are answered."""
    reading, answered = threading.Event(), threading.Event()

    def wait(_text: str) -> None:
        reading.set()
        answered.wait()

    served = await screened(serve, tmp_path, WordClassifier(before=wait))
    batch = asyncio.create_task(moderated(served, [f"text {number}" for number in range(32)]))
    await asyncio.to_thread(reading.wait)
    assert (await served.call("GET", "/healthz")).status == 200
    answered.set()
    assert len(await batch) == 32


async def test_a_client_that_leaves_takes_its_batch_along(serve: Serve, tmp_path: Path) -> None:
    """What nobody waits for any more is not read."""
    reading, left = threading.Event(), threading.Event()

    def wait(_text: str) -> None:
        reading.set()
        left.wait()

    classifier = WordClassifier(before=wait)
    served = await screened(serve, tmp_path, classifier)
    _reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    texts = [f"text {number}" for number in range(32)]
    writer.write(request_bytes("POST", PATHS[0], {"input": texts}))
    await asyncio.to_thread(reading.wait)
    writer.close()
    await until(lambda: not served.connections)
    left.set()
    assert len(await moderated(served, ["another"])) == 1
    assert len(classifier.read_full) == 2


@pytest.mark.parametrize("given", ["a bomb", ["bread", "a bomb"], [{"type": "text", "text": "a bomb"}]])
async def test_openais_sdk_reads_it(served: Served, given: Any) -> None:
    """`client.moderations.create`, as a user calls it; what is ours is among its extra fields."""
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
        answer = await client.moderations.create(input=given)
        named = await client.moderations.create(input=given, model="omni-moderation-latest")
    result = answer.results[-1]
    assert result.flagged
    assert result.categories.illicit_violent
    assert not result.categories.self_harm
    assert result.category_scores.illicit_violent == pytest.approx(0.99)
    assert result.category_applied_input_types.sexual_minors == ["text"]
    assert result.model_extra == {"watched": True}
    assert result.category_scores.model_extra["privacy"] == pytest.approx(0.01)
    assert named.results == answer.results
