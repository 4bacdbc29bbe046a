"""What every engine promises, held against each of them; SGLang is the real one, on the CPU."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from app.core import Engine, Health
from app.errors import BadRequest, ContextOverflow
from app.metering.estimate import text_counter
from tests.support.engines import Answer, ask, chat, fresh_rid, next_turn, raw

# SGLang's imports warn; what our own code warns of would be an error in the other tests.
pytestmark = pytest.mark.filterwarnings("default")

ENDLESS_TOKENS = 3000
"""More than an engine generates until an abort reaches it, also on a busy machine."""


async def test_a_started_engine_is_ready_and_describes_its_model(engine: Engine) -> None:
    """After start, health is READY and the card has limits that requests can count on."""
    assert engine.health() is Health.READY
    card = engine.model
    assert card.id
    assert 0 < card.max_prompt_tokens < card.context_length
    assert card.kv_capacity_tokens > 0


async def test_the_tokenizer_counts_prompts_before_they_are_rendered(engine: Engine) -> None:
    """Where an engine has one, tiktoken counts with it what rendering finds, but for the template."""
    tokenizer = engine.tokenizer_json()
    count, exact = text_counter(tokenizer)
    assert exact == (tokenizer is not None)
    words = "What is a token ring? "
    short, long = [len((await engine.render(chat(words * n))).token_ids) for n in (1, 41)]
    if exact:
        assert long - short == count(words * 41) - count(words)


async def test_a_text_is_tokenized_and_made_again(engine: Engine) -> None:
    """Ids become the text that they were made of, of any length; an id beyond the vocabulary is refused."""
    short = "Once upon a time there was a ring"
    long = " ".join([short] * 2000)
    for text in (short, long):
        token_ids = await engine.tokenize("owner", text, add_special_tokens=False)
        assert await engine.detokenize("owner", token_ids) == text
    assert list(await engine.tokenize("owner", "", add_special_tokens=False)) == []
    for token_id in (-1, 10**9):
        with pytest.raises(BadRequest):
            await engine.detokenize("owner", [1, token_id])


async def test_a_raw_prompt_is_read_as_it_is(engine: Engine) -> None:
    """No template is applied to text or ids, and the answer to both is the same."""
    text = "Once upon a time there was a ring"
    token_ids = list(await engine.tokenize("owner", text, add_special_tokens=True))
    as_text = await ask(engine, raw(text, temperature=0, max_tokens=12))
    as_ids = await ask(engine, raw(text, token_ids, temperature=0, max_tokens=12))
    assert list(as_text.prompt.token_ids) == list(as_ids.prompt.token_ids) == token_ids
    assert as_text.token_ids() == as_ids.token_ids() != []
    assert {delta.channel for delta in as_text.deltas} == {"text"}
    assert as_text.counts().prompt_tokens == len(token_ids)


async def test_a_preface_stands_before_a_raw_prompt(engine: Engine) -> None:
    """The operator's text comes first; the caller's ids stay as they are."""
    preface = list(await engine.tokenize("owner", "Be kind.\n\n", add_special_tokens=True))
    prompt = await engine.render(raw("one two", [5, 6, 7], preface="Be kind.\n\n"))
    assert list(prompt.token_ids) == [*preface, 5, 6, 7]


async def test_a_raw_prompt_that_cannot_be_is_refused(engine: Engine) -> None:
    """An id beyond the vocabulary, more ids than the context, and a text that is too long."""
    room = engine.model.context_length
    for request in (raw("x", [10**9]), raw("x", [-1])):
        with pytest.raises(BadRequest):
            await engine.render(request)
    for request in (raw("x", [5] * (room + 1)), raw("ring token " * room)):
        with pytest.raises(ContextOverflow):
            await engine.render(request)


async def test_counts_are_exact_and_cumulative(engine: Engine) -> None:
    """Counts never fall, and end at the number of ids handed over and of prompt tokens."""
    answer = await ask(engine, chat(max_tokens=24, ignore_eos=True))
    completions = [delta.counts.completion_tokens for delta in answer.deltas]
    assert completions == sorted(completions)
    assert answer.counts().completion_tokens == len(answer.token_ids()) == 24
    assert answer.counts().prompt_tokens == len(answer.prompt.token_ids)
    running = 0
    for delta in answer.deltas:
        running += len(delta.token_ids)
        assert delta.counts.completion_tokens == running


@pytest.mark.parametrize(
    ("options", "abort_after"),
    [({"max_tokens": 24}, None), ({"max_tokens": 8, "n": 2}, None), ({"max_tokens": 400, "n": 2}, 6)],
    ids=["whole", "choices", "aborted"],
)
async def test_ids_handed_over_are_counted_apart(
    engine: Engine, options: dict[str, int], abort_after: int | None
) -> None:
    """However a generation ends, the ids counted on arrival are those of the final counts, told once."""
    request = chat(**options, ignore_eos=True)
    answer = await ask(engine, request, abort_after)
    claimed = sum(answer.counts(choice).completion_tokens for choice in range(request.n))
    assert engine.pop_emitted_tokens(request.request_id) == claimed > 0
    assert engine.pop_emitted_tokens(request.request_id) == 0


async def test_ids_of_a_running_request_are_counted_and_kept(engine: Engine) -> None:
    """While a generation runs its ids can be asked for any number of times."""
    request = chat(max_tokens=ENDLESS_TOKENS, ignore_eos=True)
    prompt = await engine.render(request)
    received, seen = 0, []
    async for delta in engine.generate(request.request_id, prompt):
        received += len(delta.token_ids)
        if len(seen) < 3:
            seen.append(engine.pop_emitted_tokens(request.request_id) >= received > 0)
        elif len(seen) == 3:
            engine.abort(request.request_id)
    assert seen == [True] * 3
    assert engine.pop_emitted_tokens(request.request_id) == received


async def test_nothing_was_handed_over_for_an_unknown_request(engine: Engine) -> None:
    """An id that was never used has no tokens."""
    assert engine.pop_emitted_tokens(fresh_rid()) == 0


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_goes_on_behind_its_first_tokens(engine: Engine, n: int) -> None:
    """Ids, text, counts and end are those of the answer that was not cut, all of it from its first token."""
    options = {"max_tokens": 24, "n": n, "temperature": 0, "ignore_eos": True}
    whole = await ask(engine, chat(**options))
    request = chat(**options)
    prompt = await engine.render(request)
    cuts = [whole.token_ids(choice)[: 11 - 7 * choice] for choice in range(n)]
    prompt = dataclasses.replace(prompt, continued=cuts)
    resumed = Answer(prompt, [delta async for delta in engine.generate(request.request_id, prompt)])
    for choice in range(n):
        assert resumed.token_ids(choice) == whole.token_ids(choice)
        assert resumed.text(choice) == whole.text(choice)
        assert resumed.counts(choice).completion_tokens == 24
        assert resumed.finish_reason(choice) == whole.finish_reason(choice)
    assert engine.pop_emitted_tokens(request.request_id) == 24 * n


async def test_an_answer_goes_on_behind_nothing(engine: Engine) -> None:
    """A choice that has no tokens yet begins."""
    request = chat(max_tokens=8, temperature=0, ignore_eos=True)
    whole = await ask(engine, dataclasses.replace(request, request_id=fresh_rid()))
    prompt = dataclasses.replace(await engine.render(request), continued=[()])
    resumed = Answer(prompt, [delta async for delta in engine.generate(request.request_id, prompt)])
    assert resumed.token_ids() == whole.token_ids()


async def test_max_tokens_ends_with_length(engine: Engine) -> None:
    """An answer cut by max_tokens has exactly that many tokens and says so, once."""
    answer = await ask(engine, chat(max_tokens=5, ignore_eos=True))
    assert answer.prompt.max_tokens == 5
    assert [delta.finish_reason for delta in answer.deltas if delta.finish_reason] == ["length"]
    assert answer.finish_reason() == "length"
    assert answer.counts().completion_tokens == 5


async def test_every_choice_has_one_final_delta(engine: Engine) -> None:
    """With n=3 the choices come interleaved, each with its own counts and its own one end."""
    answer = await ask(engine, chat(n=3, max_tokens=48, ignore_eos=True))
    assert {delta.choice for delta in answer.deltas} == {0, 1, 2}
    first_end = next(i for i, delta in enumerate(answer.deltas) if delta.finish_reason)
    assert {delta.choice for delta in answer.deltas[:first_end]} == {0, 1, 2}
    for choice in range(3):
        finals = [delta for delta in answer.of(choice) if delta.finish_reason]
        assert finals == [answer.of(choice)[-1]]
        assert answer.counts(choice).completion_tokens == len(answer.token_ids(choice)) == 48


async def test_an_abort_ends_with_the_true_counts(engine: Engine) -> None:
    """After abort, one final delta tells what was really generated."""
    answer = await ask(engine, chat(max_tokens=ENDLESS_TOKENS, ignore_eos=True), abort_after=3)
    assert answer.finish_reason() == "abort"
    assert 3 <= answer.counts().completion_tokens == len(answer.token_ids()) < ENDLESS_TOKENS
    assert answer.counts().prompt_tokens == len(answer.prompt.token_ids)


async def test_an_abort_ends_every_choice(engine: Engine) -> None:
    """One abort stops all choices of a request, each with a final delta."""
    answer = await ask(engine, chat(n=3, max_tokens=400, ignore_eos=True), abort_after=6)
    assert [answer.finish_reason(choice) for choice in range(3)] == ["abort"] * 3
    for choice in range(3):
        assert answer.counts(choice).completion_tokens == len(answer.token_ids(choice)) < 400


async def test_an_abort_before_the_first_read_is_an_abort(engine: Engine) -> None:
    """A request aborted before anything ran ends with its prompt counted and nothing generated."""
    answer = await ask(engine, chat(n=2, max_tokens=400, ignore_eos=True), abort_after=0)
    for choice in range(2):
        assert answer.finish_reason(choice) == "abort"
        assert answer.counts(choice).completion_tokens == len(answer.token_ids(choice)) < 400


async def test_aborting_an_unknown_request_disturbs_nobody(engine: Engine) -> None:
    """Unknown ids, ids that are a prefix of a live one and finished ids are ignored."""
    request = chat(max_tokens=12, ignore_eos=True)
    prompt = await engine.render(request)
    received = 0
    async for delta in engine.generate(request.request_id, prompt):
        received += len(delta.token_ids)
        for rid in (fresh_rid(), request.request_id[:16], ""):
            engine.abort(rid)
    engine.abort(request.request_id)
    assert received == 12


async def test_a_shared_prefix_is_reported_as_cached(engine: Engine) -> None:
    """The second request with the same long system prompt finds most of it in the cache."""
    system = {"role": "system", "content": f"{fresh_rid()} Answer in one short sentence. " * 30}
    answers = [
        await ask(engine, chat(messages=[system, {"role": "user", "content": question}], max_tokens=2))
        for question in ("What is a ring?", "Who are you?")
    ]
    first, second = (answer.counts() for answer in answers)
    assert second.cached_tokens > 0.8 * second.prompt_tokens
    assert first.cached_tokens < 0.2 * first.prompt_tokens


async def test_another_salt_finds_nothing_cached(engine: Engine) -> None:
    """What was cached under one salt is computed anew under another, and found again under its own."""
    system = {"role": "system", "content": f"{fresh_rid()} Answer in one short sentence. " * 30}
    messages = [system, {"role": "user", "content": "Who are you?"}]
    parts = []
    for salt in ("owner:a", "owner:b", "", "owner:a"):
        counts = (await ask(engine, chat(messages=messages, max_tokens=2, salt=salt))).counts()
        parts.append(counts.cached_tokens / counts.prompt_tokens)
    assert max(parts[:3]) < 0.2
    assert parts[3] > 0.8


async def test_the_next_turn_begins_with_what_was_said(engine: Engine) -> None:
    """The last prompt and answer come back as the ids they were, and are counted in the limits."""
    first = await ask(engine, chat(temperature=0, max_tokens=6, ignore_eos=True))
    prompt = await engine.render(next_turn(first))
    assert (prompt.past_runs, prompt.rerendered) == (1, None)
    assert list(prompt.token_ids[: len(first.run())]) == first.run()
    assert len(prompt.token_ids) > len(first.run())


async def test_a_changed_past_is_rendered_anew(engine: Engine) -> None:
    """An answer that is not in the prompt as it was said is not taken over, and the prompt says why."""
    first = await ask(engine, chat(temperature=0, max_tokens=6, ignore_eos=True))
    request = next_turn(first, said="Something else.")
    prompt = await engine.render(request)
    assert (prompt.past_runs, prompt.rerendered) == (0, "template changed turn 1")
    anew = await engine.render(dataclasses.replace(request, past=()))
    assert prompt.token_ids == anew.token_ids


async def test_a_prompt_that_does_not_fit_is_refused_with_the_excess(engine: Engine) -> None:
    """The message states by how many tokens the prompt is too long."""
    word = "stream "
    with pytest.raises(ContextOverflow) as refused:
        await engine.render(chat(word * engine.model.context_length * 2))
    assert refused.value.code == "context_length_exceeded"
    assert " too many" in refused.value.message


async def test_an_answer_that_does_not_fit_is_refused_with_the_excess(engine: Engine) -> None:
    """Prompt and max_tokens together are held against the context, to the token."""
    prompt = await engine.render(chat(max_tokens=1))
    room = engine.model.context_length - len(prompt.token_ids)
    with pytest.raises(ContextOverflow, match=r"\b7 too many"):
        await engine.render(chat(max_tokens=room + 7))


async def test_without_max_tokens_the_answer_fits(engine: Engine) -> None:
    """A request that names no limit gets one that its prompt leaves room for."""
    prompt = await engine.render(chat(max_tokens=None))
    assert 0 < prompt.max_tokens <= engine.model.context_length - len(prompt.token_ids)


async def test_64_requests_at_once_are_all_answered_exactly(engine: Engine) -> None:
    """Many streams at once keep their tokens apart and their counts right."""
    requests = [
        chat(f"Question {number}", max_tokens=8 + number % 5, ignore_eos=True) for number in range(64)
    ]
    answers = await asyncio.gather(*(ask(engine, request) for request in requests))
    for number, answer in enumerate(answers):
        assert answer.counts().completion_tokens == len(answer.token_ids()) == 8 + number % 5


async def test_load_is_back_to_zero_when_nothing_runs(engine: Engine) -> None:
    """The load that an engine reports follows what it does."""
    await ask(engine, chat(max_tokens=4, ignore_eos=True))
    async with asyncio.timeout(30):
        while engine.load().num_running_reqs:
            await asyncio.sleep(0.05)
    assert engine.load().max_total_tokens > 0
