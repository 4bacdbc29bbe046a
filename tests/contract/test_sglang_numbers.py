"""Every number that a caller can send is refused by name, or fits the tensors of SGLang's scheduler."""

from __future__ import annotations

import copy
import math
import secrets
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.api.schema.chat_request import parse_chat_request
from app.api.schema.completions import parse_completion
from app.api.schema.parameters import PARAMETERS
from app.engine.sglang.platform import prepare_process
from app.errors import BadRequest, ServingError

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]

POWERS = [2**bits for bits in (0, 7, 8, 15, 16, 24, 30, 31, 32, 53, 62, 63, 64, 127)]
INTEGERS = sorted({sign * (power + step) for power in POWERS for step in (-1, 0, 1) for sign in (1, -1)})
SMALL = [0.0, -0.0, 5e-324, 1e-320, 1e-46, 1e-45, 1e-38, 1e-20, 1e-7, 1e-6, 1.1e-6, 0.01, 0.5]
FLOATS = [
    *SMALL,
    1.0,
    math.nextafter(1, 0),
    math.nextafter(1, 2),
    1.99,
    2.0,
    math.nextafter(2, 3),
    100.0,
    1e6,
]
FLOATS += [3.4e38, 3.5e38, 1.8e308, math.inf, math.nan]
NUMBERS = st.sampled_from([*INTEGERS, *FLOATS, *(-value for value in FLOATS)])
NUMERIC = {name: p for name, p in PARAMETERS.items() if int in p.kinds and p.refusal is None}


def allowed(name: str) -> Any:
    """A parameter with a number that its table allows."""
    parameter = NUMERIC[name]
    low, high = parameter.minimum or 0, 40 if parameter.maximum is None else parameter.maximum
    values = [value for value in (low, high, *INTEGERS, *SMALL) if low <= value <= high]
    whole = [value for value in values if isinstance(value, int) or float in parameter.kinds]
    return st.tuples(st.just(name), st.sampled_from(whole))


NAMES = st.sampled_from(sorted(NUMERIC.keys() - {"max_completion_tokens", "n_predict", "repeat_penalty"}))
ALLOWED = st.lists(NAMES.flatmap(allowed), max_size=6).map(dict)
ANY = st.dictionaries(st.sampled_from(sorted(NUMERIC)), NUMBERS, max_size=2)
BODIES = ALLOWED | ALLOWED | ANY | st.tuples(ALLOWED, ANY).map(lambda pair: pair[0] | pair[1])
IN_VOCABULARY = st.sampled_from([0, 2, 9, 255, 256, 8191, 10_239])
TOKEN_IDS = IN_VOCABULARY | st.sampled_from([*INTEGERS, 10_240])
BIASES = st.dictionaries(
    IN_VOCABULARY.map(str) | st.just("01"), st.sampled_from([*SMALL, 1, -100, 100]), max_size=3
)
ANY_BIASES = st.dictionaries(TOKEN_IDS.map(str) | st.sampled_from(["1e3", "-1", ""]), NUMBERS, max_size=3)


DETERMINISTIC = SimpleNamespace(
    deterministic=SimpleNamespace(enable_deterministic_inference=True),
    features=SimpleNamespace(enable_custom_logit_processor=False),
)
"""SGLang's mode in which a batch has its seeds in a tensor; it does not start on a CPU."""


class Batch(SimpleNamespace):
    """What SGLang's sampling asks of a batch; it is referred to weakly."""


def sampled(engine: Any, params: list[Any], seeds: list[int] | None = None) -> None:
    """Sample from a batch of these parameters as SGLang's scheduler does, and check its numbers."""
    import torch
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as sample
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    manager = engine._run.launched.manager
    vocab_size = manager.model_config.vocab_size
    eos, tokenizer = set(manager.model_config.hf_eos_token_id), manager.tokenizer
    tokenizer.additional_stop_token_ids = getattr(tokenizer, "additional_stop_token_ids", None)
    same = {"return_sampling_mask": False, "custom_logit_processor": None, "output_ids": []}
    reqs = [
        SimpleNamespace(sampling_params=p, eos_token_ids=eos, tokenizer=tokenizer, **same) for p in params
    ]
    batch = Batch(reqs=reqs, device="cpu")
    info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
    logits = torch.linspace(-40, 40, vocab_size).repeat(len(reqs), 1)
    for step in range(3):
        after = logits.clone()
        info.apply_logits_bias(after)
        assert not after.isnan().any()
        assert not after.isposinf().any()
        probs = torch.softmax(after.div_(info.temperatures), dim=-1)
        assert torch.allclose(probs.sum(dim=-1), torch.ones(len(reqs)), atol=1e-3)
        ids = sample(
            probs, info.top_ks, info.top_ps, info.min_ps, info.need_min_p_sampling, None, torch.tensor([step])
        )
        assert ((ids >= 0) & (ids < vocab_size)).all()
        info.penalizer_orchestrator.cumulate_output_tokens(ids.to(torch.int64))
    for params_of_one in params:
        torch.tensor(params_of_one.max_new_tokens, dtype=torch.int32)
    if seeds is not None:
        seeded = [copy.copy(params[0]) for _ in seeds]
        for each, seed in zip(seeded, seeds, strict=True):
            each.sampling_seed = seed
        reqs = [
            SimpleNamespace(sampling_params=p, eos_token_ids=eos, tokenizer=tokenizer, **same) for p in seeded
        ]
        batch = Batch(reqs=reqs, device="cpu")
        with mock.patch("sglang.srt.sampling.sampling_batch_info.get_exec", return_value=DETERMINISTIC):
            info = SamplingBatchInfo.from_schedule_batch(batch, vocab_size)
        assert info.sampling_seed.tolist() == seeds


def check_refusal(error: ServingError) -> None:
    """Check that a refusal names its parameter."""
    assert error.param, error.message


async def rendered(engine: Any, request: Any) -> list[Any]:
    """The request's sampling parameters as the scheduler gets them; none where it was refused by name."""
    try:
        prompt = await engine.render(request)
    except BadRequest as error:
        check_refusal(error)
        return []
    return [prompt.handle.sent.sampling_params]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    body=BODIES,
    stop_ids=st.lists(IN_VOCABULARY, max_size=4) | st.lists(TOKEN_IDS, max_size=2),
    biases=BIASES | BIASES | ANY_BIASES,
)
@example(body={"seed": 2**63 - 1, "n": 128}, stop_ids=[], biases={})
@example(body={"min_tokens": 2**31, "max_tokens": 2**31}, stop_ids=[2, 9], biases={})
@example(body={"temperature": 1.1e-6, "repetition_penalty": 0.01}, stop_ids=[], biases={"9": 100, "8": -100})
@example(body={"frequency_penalty": math.nan}, stop_ids=[], biases={})
async def test_numbers_of_a_chat_fit(sglang_engine: Any, body: Any, stop_ids: list[int], biases: Any) -> None:
    """Whatever the parameters are, SGLang's sampling has finite numbers, whole ids and seeds in int64."""
    sent = {"model": "m", "messages": [{"role": "user", "content": "a"}], "logprobs": True, **body}
    sent |= {"stop_token_ids": stop_ids} if stop_ids else {}
    sent |= {"logit_bias": biases} if biases else {}
    try:
        request = parse_chat_request(sent, secrets.token_hex(16), "owner")
    except BadRequest as error:
        check_refusal(error)
        return
    from app.engine.sglang.render import seed_of_choice

    params = await rendered(sglang_engine, request)
    seeds = [seed_of_choice(request.body.get("seed"), index) for index in range(request.n)]
    if params:
        sampled(sglang_engine, params, seeds)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompt=st.lists(IN_VOCABULARY, min_size=1) | st.lists(TOKEN_IDS | NUMBERS, min_size=1, max_size=3),
    body=BODIES,
    logprobs=st.integers(0, 20) | NUMBERS,
)
@example(prompt=[32_767], body={}, logprobs=0)
async def test_numbers_of_a_completion_fit(
    sglang_engine: Any, prompt: list[Any], body: Any, logprobs: Any
) -> None:
    """The ids of a prompt are in the vocabulary, and the rest is as in a chat."""
    try:
        body = {"model": "m", "prompt": prompt, "logprobs": logprobs, **body}
        [request] = parse_completion(body, "owner", make_id=lambda: secrets.token_hex(16))
    except BadRequest as error:
        check_refusal(error)
        return
    params = await rendered(sglang_engine, request)
    if params:
        assert request.raw is not None
        assert all(0 <= token_id < 10_240 for token_id in request.raw.token_ids or ())
        sampled(sglang_engine, params)


@settings(deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 127))
def test_seeds_of_choices_differ_and_fit(seed: int, index: int):
    """A choice's seed is an int64, that of the first is the request's, and no two choices share one."""
    prepare_process()
    from app.engine.sglang.render import seed_of_choice

    seeds = {seed_of_choice(seed, each) for each in range(128)}
    assert len(seeds) == 128
    assert all(-(2**63) <= each < 2**63 for each in seeds)
    assert seed_of_choice(seed, 0) == seed
    assert seed_of_choice(None, index) != seed_of_choice(None, index)
