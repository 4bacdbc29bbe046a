"""What SGLang alone can do: formats, tools, logprobs, seeds; and its own counts as the reference."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from typing import Any

import pytest

from app.api.schema.chat_request import parse_chat_request
from app.core import Counts, Delta
from app.errors import BadRequest, ContextOverflow, ServingError, UnsupportedParameter
from tests.support.engines import Answer, ask, chat, fresh_rid, next_turn

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm", "Bonn"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}


async def sglangs_own(engine: Any, request: Any) -> dict[str, Any]:
    """The same prompt through SGLang's own path: the last chunk, with all text and ids."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    prompt = await engine.render(request)
    params = {"temperature": 0, "max_new_tokens": prompt.max_tokens}
    for name in ("ignore_eos", "stop", "regex"):
        if name in request.body:
            params[name] = request.body[name]
    internal = GenerateReqInput(
        input_ids=list(prompt.token_ids), sampling_params=params, stream=True, rid=request.request_id
    )
    text, token_ids, last = "", [], {}
    async for last in engine._running().launched.manager.generate_request(internal, None):
        text += last["text"]
        token_ids += last["output_ids"]
    return last | {"text": text, "output_ids": token_ids}


@pytest.mark.parametrize(
    "body", [{"ignore_eos": True}, {"stop": ["e"]}, {"regex": "[a-z ]{5,30}"}], ids=["plain", "stop", "regex"]
)
async def test_text_and_counts_equal_sglangs_own(sglang_engine: Any, body: dict[str, Any]) -> None:
    """The batched hand-over gives the text, ids, counts and finish of SGLang's own path."""
    requests = [
        chat(f"{number} bottles of what?", temperature=0, max_tokens=32, **body) for number in range(12)
    ]
    ours = [await ask(sglang_engine, request) for request in requests]
    theirs = [await sglangs_own(sglang_engine, request) for request in requests]
    for answer, reference in zip(ours, theirs, strict=True):
        meta = reference["meta_info"]
        assert answer.text() == reference["text"]
        assert answer.token_ids() == reference["output_ids"]
        assert answer.counts().prompt_tokens == meta["prompt_tokens"]
        assert answer.counts().completion_tokens == meta["completion_tokens"]
        assert answer.finish_reason() == meta["finish_reason"]["type"]
        assert answer.of()[-1].matched_stop == meta["finish_reason"].get("matched")


async def test_the_engine_says_how_many_it_runs_at_once(sglang_engine: Any) -> None:
    """What is beyond that would wait in SGLang's own queue, so admission must know it."""
    assert sglang_engine.load().max_running_reqs == 256


async def test_both_paths_at_once_keep_their_outputs_apart(sglang_engine: Any) -> None:
    """Batches that mix our requests with SGLang's own reach both, whole."""
    requests = [chat(f"Say {number}", temperature=0, max_tokens=40, ignore_eos=True) for number in range(8)]
    ours, theirs = await asyncio.gather(
        asyncio.gather(*(ask(sglang_engine, request) for request in requests[:4])),
        asyncio.gather(*(sglangs_own(sglang_engine, request) for request in requests[4:])),
    )
    assert [len(answer.token_ids()) for answer in ours] == [40] * 4
    assert [len(reference["output_ids"]) for reference in theirs] == [40] * 4


async def test_the_stream_is_the_whole_text(sglang_engine: Any) -> None:
    """The deltas' text, joined, is what the tokenizer makes of all ids."""
    answer = await ask(sglang_engine, chat(max_tokens=64, ignore_eos=True, skip_special_tokens=False))
    tokenizer = sglang_engine._running().launched.manager.tokenizer
    whole = tokenizer.decode(answer.token_ids())
    assert whole.startswith(answer.text().removesuffix("\ufffd"))
    assert len(answer.text()) > 0


async def test_greedy_output_repeats(sglang_engine: Any) -> None:
    """At temperature 0 the same prompt gives the same ids, alone and among others."""
    alone = await ask(sglang_engine, chat("Once", temperature=0, max_tokens=32, ignore_eos=True))
    others = [chat(f"Other {number}", max_tokens=32, ignore_eos=True) for number in range(7)]
    again, *_ = await asyncio.gather(
        ask(sglang_engine, chat("Once", temperature=0, max_tokens=32, ignore_eos=True)),
        *(ask(sglang_engine, other) for other in others),
    )
    assert alone.token_ids() == again.token_ids()


async def test_a_stop_string_ends_the_answer_before_it(sglang_engine: Any) -> None:
    """The stop string is named in the final delta and not part of the text."""
    free = await ask(sglang_engine, chat(temperature=0, max_tokens=40, ignore_eos=True))
    stop = free.text()[10:13]
    stopped = await ask(sglang_engine, chat(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop]))
    assert stopped.finish_reason() == "stop"
    assert stopped.of()[-1].matched_stop == stop
    # It may span tokens: none of it may have been given out before it was whole.
    assert stopped.text() == free.text()[: free.text().find(stop)]
    assert stopped.counts().completion_tokens == len(stopped.token_ids()) < 40


async def test_an_abort_in_the_queue_counts_the_prompt_and_nothing_else(sglang_engine: Any) -> None:
    """Requests beyond max_running_requests wait; aborted there, they were never run."""
    running = [chat(f"{number}", max_tokens=200, ignore_eos=True) for number in range(256)]
    tasks = [asyncio.create_task(ask(sglang_engine, request)) for request in running]
    try:
        async with asyncio.timeout(60):
            while sglang_engine.load().num_running_reqs < 256:
                await asyncio.sleep(0.05)
        waiting = chat("I wait", max_tokens=50, ignore_eos=True)
        prompt = await sglang_engine.render(waiting)
        deltas: list[Delta] = []
        stream = sglang_engine.generate(waiting.request_id, prompt)
        reader = asyncio.create_task(_read(stream, deltas))
        await asyncio.sleep(0)  # the reader's first step sends the request
        sglang_engine.abort(waiting.request_id)
        await reader
    finally:
        for request in running:
            sglang_engine.abort(request.request_id)
        await asyncio.gather(*tasks)
    assert [delta.finish_reason for delta in deltas] == ["abort"]
    assert deltas[0].counts == Counts(prompt_tokens=len(prompt.token_ids))


async def _read(stream: Any, into: list[Delta]) -> None:
    into.extend([delta async for delta in stream])


# --- past turns


@pytest.mark.parametrize(
    ("body", "reason"),
    [({"regex": "[a-z ]{20,40}"}, "stop"), ({"max_tokens": 6, "ignore_eos": True}, "length")],
    ids=["ended by its end token", "cut"],
)
async def test_the_next_turn_finds_all_of_the_last_in_the_cache(
    sglang_engine: Any, body: dict[str, Any], reason: str
) -> None:
    """Turn 2 has all of turn 1 cached, but for a page and the last token, which was never computed."""
    first = await ask(sglang_engine, chat(**{"temperature": 0, "max_tokens": 60} | body))
    assert first.finish_reason() == reason
    second = await ask(sglang_engine, next_turn(first, max_tokens=2, ignore_eos=True))
    assert (second.prompt.past_runs, second.prompt.rerendered) == (1, None)
    assert list(second.prompt.token_ids[: len(first.run())]) == first.run()
    page = sglang_engine._running().launched.page_size
    assert second.counts().cached_tokens >= len(first.run()) - page - 2
    tokenizer = sglang_engine._running().launched.manager.tokenizer
    anew = await sglang_engine.render(dataclasses.replace(next_turn(first), past=()))
    assert tokenizer.decode(second.prompt.token_ids) == tokenizer.decode(anew.token_ids)
    assert tokenizer.decode(anew.token_ids).count(tokenizer.eos_token) == 3


async def test_an_answer_in_unusual_tokens_is_cached_as_it_was_said(sglang_engine: Any) -> None:
    """What the tokenizer would cut otherwise goes back letter by letter, as it came."""
    first = await sglang_engine.render(chat())
    tokenizer = sglang_engine._running().launched.manager.tokenizer
    said = "A ring\u2019s end: na\u00efve \u4e16\u754c \U0001f600"
    letters = [token_id for letter in said for token_id in tokenizer.encode(letter)]
    assert letters != tokenizer.encode(said)
    run = [*first.token_ids, *letters]
    messages = [
        {"role": "user", "content": "How do I resume a stream?"},
        {"role": "assistant", "content": said},
    ]
    again = {"role": "user", "content": "Again?"}
    answers = [
        await ask(sglang_engine, chat(messages=[*messages, again], past=[run], max_tokens=1))
        for _ in range(2)
    ]
    assert all(list(answer.prompt.token_ids[: len(run)]) == run for answer in answers)
    assert answers[1].counts().cached_tokens >= len(run)


async def test_the_limits_hold_for_the_ids_that_were_said(sglang_engine: Any) -> None:
    """A past in more tokens than the tokenizer would use is refused for its own length."""
    said = "stream " * 1500
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    question = [*messages, {"role": "user", "content": "Hi"}]
    tokenizer = sglang_engine._running().launched.manager.tokenizer
    run = (await sglang_engine.render(chat("Hi"))).token_ids
    run = [*run, *(token_id for letter in said for token_id in tokenizer.encode(letter))]
    assert (await sglang_engine.render(chat(messages=question))).past_runs == 0
    with pytest.raises(ContextOverflow, match="too many"):
        await sglang_engine.render(chat(messages=question, past=[run]))


# --- formats


async def test_a_json_schema_is_obeyed(sglang_engine: Any) -> None:
    """With response_format json_schema the text parses and fits the schema."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "level": {"enum": ["low", "high"]}},
        "required": ["ok", "level"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "state", "schema": schema, "strict": True}}
    answer = await ask(sglang_engine, chat(response_format=form, max_tokens=64))
    value = json.loads(answer.text())
    assert isinstance(value["ok"], bool)
    assert value["level"] in {"low", "high"}
    assert answer.finish_reason() == "stop"


async def test_a_regex_is_obeyed(sglang_engine: Any) -> None:
    """SGLang's own `regex` parameter constrains the text."""
    answer = await ask(sglang_engine, chat(regex="[0-9]{3}-[a-f]{4}", max_tokens=32))
    assert re.fullmatch("[0-9]{3}-[a-f]{4}", answer.text())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"regex": "(("}, "regex"),
        ({"ebnf": "root ::= ["}, "ebnf"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"min_tokens": 99, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_sglang_refuses_is_refused_by_name(
    sglang_engine: Any, body: dict[str, Any], param: str
) -> None:
    """A value that SGLang cannot take is a 400 before anything runs, and names the parameter."""
    with pytest.raises(BadRequest) as refused:
        await sglang_engine.render(chat(**body))
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        {"cache_salt": "mine"},
        {"priority": 100},
        {"rid": "0"},
        {"lora_path": "/x"},
        {"custom_logit_processor": "x"},
        {"session_params": {"id": "x"}},
        {"bootstrap_host": "x"},
        {"extra_key": "x"},
        {"return_hidden_states": True},
        {"input_ids": [1, 2]},
        {"no_such_parameter": 1},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_server_owned_parameters_are_refused_by_name(sglang_engine: Any, body: dict[str, Any]) -> None:
    """What only the server sets never comes from a caller's body, even if the API layer let it pass."""
    with pytest.raises(UnsupportedParameter) as refused:
        await sglang_engine.render(chat(**body))
    assert refused.value.param == next(iter(body))


@pytest.mark.parametrize(
    "body", [{"reasoning_effort": "high"}, {"seed": 5}], ids=lambda body: next(iter(body))
)
async def test_what_this_engine_cannot_heed_is_refused_only_by_a_strict_server(
    sglang_engine: Any, body: dict[str, Any]
) -> None:
    """A seed is best effort, as OpenAI has it; a model that does not reason makes no effort."""
    answer = await ask(sglang_engine, chat(temperature=1, max_tokens=4, **body))
    assert answer.counts().completion_tokens > 0
    with pytest.raises(UnsupportedParameter) as refused:
        await sglang_engine.render(dataclasses.replace(chat(temperature=1, **body), strict=True))
    assert refused.value.param == next(iter(body))


async def test_an_image_is_refused_by_a_text_model(sglang_engine: Any) -> None:
    """A model that reads text only says which part it cannot read."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(BadRequest) as refused:
        await sglang_engine.render(chat([part]))
    assert refused.value.code == "unsupported_content"


async def test_a_rendering_error_leaves_nothing_behind(sglang_engine: Any) -> None:
    """A refused request leaves no state in SGLang's tables."""
    with pytest.raises(ServingError):
        await sglang_engine.render(chat(temperature=-1))
    with pytest.raises(ServingError):
        await sglang_engine.render(chat("stream " * 20_000))
    assert sglang_engine._running().launched.manager.rid_to_state == {}
    assert sglang_engine._streams == {}


# --- tools


def calls(answer: Answer) -> dict[int, dict[str, Any]]:
    """The tool calls of a choice, put together from their fragments as a client does."""
    found: dict[int, dict[str, Any]] = {}
    for delta in answer.of():
        if delta.tool is not None:
            call = found.setdefault(delta.tool.index, {"ids": [], "names": [], "arguments": ""})
            call["ids"] += [delta.tool.id] if delta.tool.id else []
            call["names"] += [delta.tool.name] if delta.tool.name else []
            call["arguments"] += delta.text
    return found


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
async def test_a_forced_tool_call_streams_its_arguments(sglang_engine: Any, choice: Any) -> None:
    """The call has one id and one name, its fragments parse as arguments, and the finish says so."""
    tools = [WEATHER] if choice == "required" else [WEATHER, CLOCK]
    answer = await ask(sglang_engine, chat(tools=tools, tool_choice=choice, max_tokens=300, temperature=0))
    assert answer.finish_reason() == "tool_calls"
    found = calls(answer)
    assert found
    for call in found.values():
        assert len(call["ids"]) == 1
        assert call["names"] == ["weather"]
        assert json.loads(call["arguments"])["city"] in {"Ulm", "Bonn"}
    assert answer.text() == ""
    assert answer.counts().completion_tokens == len(answer.token_ids())


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool with this schema."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def trip(keyword: str, *cities: str, described: int = 10) -> dict[str, Any]:
    """A schema that refers to a definition below the keyword, as those of nested Pydantic models do."""
    city = {"enum": [*cities], "description": "d" * described, "title": "City"}
    return {
        keyword: {"City": city},
        "type": "object",
        "properties": {"to": {"$ref": f"#/{keyword}/City"}, "back": {"$ref": "#/properties/to"}},
        "required": ["to", "back"],
        "additionalProperties": False,
        "description": "d" * described,
    }


def named(name: str) -> dict[str, Any]:
    """The choice of a tool."""
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
@pytest.mark.parametrize("choice", ["required", named("go")], ids=["required", "named"])
async def test_a_forced_call_obeys_definitions_and_references(
    sglang_engine: Any, choice: Any, keyword: str
) -> None:
    """The definitions of a tool's schema hold wherever SGLang puts the schema."""
    tools = [tool("go", trip(keyword, "Ulm", "Bonn"))]
    answer = await ask(
        sglang_engine,
        chat(tools=tools, tool_choice=choice, max_tokens=200, temperature=0, parallel_tool_calls=False),
    )
    [call] = calls(answer).values()
    arguments = json.loads(call["arguments"])
    assert call["names"] == ["go"]
    assert arguments.keys() == {"to", "back"}
    assert set(arguments.values()) <= {"Ulm", "Bonn"}


async def test_two_tools_may_define_different_things_under_a_name(sglang_engine: Any) -> None:
    """Each call has the cities of its own tool, and the prompt still has both."""
    tools = [tool("go", trip("$defs", "Ulm")), tool("fly", trip("$defs", "Oslo"))]
    for name, city in (("go", "Ulm"), ("fly", "Oslo")):
        request = chat(tools=tools, tool_choice=named(name), max_tokens=100, temperature=0)
        [call] = calls(await ask(sglang_engine, request)).values()
        assert (call["names"], json.loads(call["arguments"])["to"]) == ([name], city)
    either = chat(tools=tools, tool_choice="required", max_tokens=100, temperature=0)
    [call] = calls(await ask(sglang_engine, either)).values()
    assert json.loads(call["arguments"])["to"] == {"go": "Ulm", "fly": "Oslo"}[call["names"][0]]


async def test_descriptions_of_tools_are_no_part_of_their_grammar(sglang_engine: Any) -> None:
    """40 tools with 80,000 characters of descriptions are too long for the context, not for a grammar."""
    tools = [tool(f"go_{n}", trip("$defs", "Ulm", described=1_000)) for n in range(40)]
    with pytest.raises(ContextOverflow) as refused:
        await sglang_engine.render(chat(tools=tools, tool_choice="required"))
    assert refused.value.param == "messages"


async def test_a_schema_may_call_its_properties_as_it_likes(sglang_engine: Any) -> None:
    """A property with the name of an annotation stays; the annotation goes."""
    schema = {
        "type": "object",
        "title": "T",
        "properties": {name: {"const": name} for name in ("title", "description", "default")},
        "required": ["title", "description", "default"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await ask(sglang_engine, chat(response_format=form, max_tokens=64, temperature=0))
    assert json.loads(answer.text()) == {name: name for name in ("title", "description", "default")}


async def test_a_choice_of_texts_is_any_of_them_exactly(sglang_engine: Any) -> None:
    """The grammar that is made of vLLM's `guided_choice` takes each character as it is."""
    text = 'a "quoted"\\ [line]\nänd 世界'
    request = parse_chat_request(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "?"}],
            "guided_choice": [text],
            "max_tokens": 99,
        },
        fresh_rid(),
        "owner",
    )
    assert (await ask(sglang_engine, request)).text() == text


async def test_tools_left_to_the_model_may_go_unused(sglang_engine: Any) -> None:
    """With tool_choice auto an answer without a call is text, and finishes as text does."""
    answer = await ask(sglang_engine, chat(tools=[CLOCK], max_tokens=6, ignore_eos=True, temperature=0))
    assert answer.finish_reason() == "length"
    assert calls(answer) == {}
    assert answer.counts().completion_tokens == len(answer.token_ids()) == 6


# --- logprobs


async def test_logprobs_are_one_entry_per_token(sglang_engine: Any) -> None:
    """Entries have OpenAI's shape; greedy, each token is the first of its own alternatives."""
    answer = await ask(
        sglang_engine,
        chat(logprobs=True, top_logprobs=3, temperature=0, max_tokens=12, ignore_eos=True),
    )
    entries = answer.logprobs()
    assert len(entries) == 12
    for entry in entries:
        assert entry["bytes"] == list(entry["token"].encode())
        assert len(entry["top_logprobs"]) == 3
        best = max(entry["top_logprobs"], key=lambda alternative: alternative["logprob"])
        assert best["token"] == entry["token"]
        assert best["logprob"] == pytest.approx(entry["logprob"])


async def test_logprobs_without_alternatives(sglang_engine: Any) -> None:
    """Without top_logprobs the alternatives are an empty list, as OpenAI's are."""
    answer = await ask(sglang_engine, chat(logprobs=True, max_tokens=4, ignore_eos=True))
    assert [entry["top_logprobs"] for entry in answer.logprobs()] == [[]] * 4
