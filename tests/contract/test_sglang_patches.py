"""What is replaced of SGLang's own functions, against those functions."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import warnings
from array import array
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.sglang.args import BUILTIN_MODEL
from app.engine.sglang.platform import prepare_process

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("default")]

LONG = 10**6
"""A window of more tokens than any answer here has."""
STOPS = ["\n\n", "END", "aab", "ab", "é", "日本語", "😀!", " the ", "aaaa", "\ufffd"]
WORDS = [*"ab \né日本語😀!", " the", "aa", "END", "E", "the ", "\u200d"]


@pytest.fixture(scope="module", autouse=True)
def _importable() -> None:
    prepare_process()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports warn of hardware that this machine does not have
        import app.engine.sglang.scheduler  # noqa: F401


def modules() -> Iterator[Any]:
    """The modules that replace something."""
    import app.engine.sglang.patches as package

    for found in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{found.name}")


def test_sglang_has_the_functions_that_were_replaced():
    """Each function that is replaced is the one that the replacement was written against, in its version."""
    for module in modules():
        assert module.REPLACED
        assert f"SGLang {version('sglang')}" in module.__doc__, module.__name__
        for place, digest in module.REPLACED.items():
            name, path = place.split(":")
            function: Any = importlib.import_module(f"sglang.srt.{name}")
            for part in path.split("."):
                function = inspect.getattr_static(function, part)
            source = inspect.getsource(getattr(function, "__func__", function))
            assert hashlib.sha256(source.encode()).hexdigest()[:16] == digest, place


# --- stop strings


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The built-in model's, of which each byte is a token too."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BUILTIN_MODEL)


@pytest.fixture(scope="module")
def replaced() -> tuple[Any, Any]:
    """SGLang's two functions, and ours, as plain functions."""
    from sglang.srt.managers.schedule_batch import Req

    from app.engine.sglang.patches import stop_strings

    names = "check_match_stop_str_prefix", "_check_str_based_finish"
    theirs = [getattr(Req, name) for name in names]
    stop_strings.install()
    ours = [getattr(Req, name) for name in names]
    for name, function in zip(names, theirs, strict=True):
        setattr(Req, name, function)
    return theirs, ours


def an_answer(tokenizer: Any, stops: list[str]) -> Any:
    """SGLang's request with these stops, whose window is all of its answer."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req.__new__(Req)
    req.sampling_params = SamplingParams(stop=stops)
    req.sampling_params.normalize(tokenizer)
    req.sampling_params.stop_str_max_len = LONG
    req.tokenizer, req.decoded_text = tokenizer, ""
    req.output_ids = array("q")
    req.finished_reason = req.finished_len = None
    return req


def outcome(req: Any, functions: Any, num_new: int) -> tuple[Any, ...]:
    """Whether a stop has begun after so many new tokens, or which has ended the answer, and where."""
    begins, ends = functions
    if ends(req, num_new):
        return req.finished_reason.matched, req.finished_len
    return (begins(req),)


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(
        st.sampled_from(STOPS) | st.text(st.sampled_from("ab \né日"), min_size=1), min_size=1, max_size=5
    ),
    words=st.lists(st.sampled_from(WORDS), max_size=40),
    single_bytes=st.lists(st.integers(0, 255), max_size=6),
    sizes=st.lists(st.integers(1, 4), min_size=1),
)
def test_stops_are_those_that_sglang_finds(
    tokenizer: Any,
    replaced: Any,
    stops: list[str],
    words: list[str],
    single_bytes: list[int],
    sizes: list[int],
):
    """After each step of 1 to 4 tokens, both find the same stop at the same token, or the same beginning."""
    ids = [token_id for word in words for token_id in tokenizer.encode(word, add_special_tokens=False)]
    broken = [bytes_of(tokenizer)[value] for value in single_bytes]  # characters that are never whole
    ids = ids[: len(ids) // 2] + broken + ids[len(ids) // 2 :]
    theirs, ours = an_answer(tokenizer, stops), an_answer(tokenizer, stops)
    at = number = 0
    while at < len(ids) and theirs.finished_reason is None:
        new = ids[at : at + sizes[number % len(sizes)]]
        theirs.output_ids.extend(new)
        ours.output_ids.extend(new)
        assert outcome(ours, replaced[1], len(new)) == outcome(theirs, replaced[0], len(new))
        at, number = at + len(new), number + 1


def bytes_of(tokenizer: Any) -> dict[int, int]:
    """The token of each byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {value: tokenizer.convert_tokens_to_ids(char) for value, char in bytes_to_unicode().items()}


def test_a_stop_is_found_in_other_tokens_than_its_own(tokenizer: Any, replaced: Any):
    """A stop that the model spells letter by letter ends the answer; SGLang's window is too short for it."""
    found = []
    for functions in replaced:
        req = an_answer(tokenizer, [" resume a stream"])
        req.sampling_params.normalize(tokenizer)
        req.sampling_params.stop_str_max_len = len(
            tokenizer.encode(" resume a stream", add_special_tokens=False)
        )
        for value in b" resume a stream":
            req.output_ids.append(bytes_of(tokenizer)[value])
            end = outcome(req, functions, 1)
        found.append(end)
    assert found == [(False,), (" resume a stream", 16)]


def test_an_answer_that_goes_on_is_read_in_one_piece(tokenizer: Any, replaced: Any):
    """What was generated before an engine was lost counts: a stop that began in it is found with its end."""
    begins, ends = replaced[1]
    req = an_answer(tokenizer, ["stream of tokens"])
    req.output_ids.extend(
        tokenizer.encode("A long answer. " * 30 + "It is a stream", add_special_tokens=False)
    )
    assert not ends(req, 1)
    assert begins(req)
    req.output_ids.extend(tokenizer.encode(" of tokens", add_special_tokens=False))
    assert ends(req, 1)


def counting(tokenizer: Any, decoded: list[int]) -> Any:
    """The tokenizer, noting how many tokens each call decodes."""

    def decode(ids: Any) -> str:
        decoded.append(len(ids))
        return str(tokenizer.decode(ids))

    return SimpleNamespace(decode=decode)


def test_a_step_reads_its_new_text_alone(tokenizer: Any, replaced: Any):
    """With 16 stops of 1,000 characters a step decodes 32 tokens at most; SGLang's decodes 2,000."""
    stops = ["b" + "a" * 998 + chr(0x62 + number) for number in range(16)]
    most = []
    for functions in replaced:
        req = an_answer(tokenizer, stops)
        decoded: list[int] = []
        req.tokenizer = counting(tokenizer, decoded)
        steps = []
        for _ in range(1000):
            req.output_ids.append(bytes_of(tokenizer)[0x61])
            assert outcome(req, functions, 1) == (False,)
            steps.append(sum(decoded))
            decoded.clear()
        most.append(max(steps))
    assert most[0] == 2000
    assert most[1] <= 32


def test_characters_without_an_end_are_not_read_again_and_again(tokenizer: Any, replaced: Any):
    """An answer of half characters, which `logit_bias` can force, costs no more with its length."""
    req = an_answer(tokenizer, ["stop"])
    decoded: list[int] = []
    req.tokenizer = counting(tokenizer, decoded)
    for _ in range(500):
        req.output_ids.append(bytes_of(tokenizer)[0x80])
        outcome(req, replaced[1], 1)
    assert max(decoded) <= 64
    for value in b"stop":
        req.output_ids.append(bytes_of(tokenizer)[value])
    assert outcome(req, replaced[1], 4) == ("stop", 504)


# --- logit_bias


@settings(deadline=None)
@given(
    biases=st.lists(
        st.none() | st.dictionaries(st.sampled_from(["0", "1", "01", "7", "31"]), st.floats(-100, 100)),
        max_size=4,
    ).filter(any)
)
def test_biases_are_those_that_sglang_writes(biases: list[dict[str, float] | None]):
    """One indexed write a request gives the tensor that SGLang fills entry by entry."""
    import torch

    from app.engine.sglang.patches.logit_bias import bias_tensor

    theirs = torch.zeros(len(biases), 32)
    for i, bias in enumerate(biases):
        for key, value in (bias or {}).items():
            theirs[i, int(key)] = value
    assert torch.equal(bias_tensor(biases, 32, "cpu"), theirs)


def test_biases_are_written_by_request(monkeypatch: pytest.MonkeyPatch):
    """A batch begins with its biases in SGLang's tensor, and its requests keep theirs."""
    import torch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from app.engine.sglang.patches import logit_bias

    seen: list[Any] = []

    def begin(cls: Any, batch: Any, vocab_size: int) -> Any:
        seen.append([req.sampling_params.logit_bias for req in batch.reqs])
        return SimpleNamespace(logit_bias=None)

    monkeypatch.setattr(SamplingBatchInfo, "from_schedule_batch", classmethod(begin))
    logit_bias.install()
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(logit_bias=bias)) for bias in (None, {"3": 2.5})]
    info = SamplingBatchInfo.from_schedule_batch(SimpleNamespace(reqs=reqs, device="cpu"), 8)
    assert seen == [[None, None]]
    assert info.logit_bias.tolist() == [[0.0] * 8, [0, 0, 0, 2.5, 0, 0, 0, 0]]
    assert [req.sampling_params.logit_bias for req in reqs] == [None, {"3": 2.5}]
    assert info.logit_bias.dtype == torch.float32


# --- rows without a token


@pytest.fixture(scope="module")
def compiled() -> Any:
    """A grammar over the letters a to d and two ends, by regex."""
    import xgrammar
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    info = xgrammar.TokenizerInfo([b"a", b"b", b"c", b"d", b"<end>", b"<eot>"], stop_token_ids=[4, 5])

    def make(regex: str) -> Any:
        context = xgrammar.GrammarCompiler(info).compile_regex(regex)
        return XGrammarGrammar(xgrammar.GrammarMatcher(context), 6, context, None)

    return make


@pytest.fixture
def leaving_an_end() -> Iterator[None]:
    """With SGLang's functions replaced."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from app.engine.sglang.patches import dead_ends

    places = [
        (SamplingBatchInfo, "apply_logits_bias"),
        (SamplingBatchInfo, "apply_logits_bias_with_observer"),
    ]
    places += [(XGrammarGrammar, "accept_token"), (XGrammarGrammar, "is_terminated")]
    kept = [(owner, name, owner.__dict__[name]) for owner, name in places]
    dead_ends.install()
    yield
    for owner, name, function in kept:
        setattr(owner, name, function)


@pytest.mark.usefixtures("leaving_an_end")
def test_only_an_end_is_left_where_nothing_is(compiled: Any):
    """In a row without a token both ends are allowed, and nothing else; other rows stay as they are."""
    import torch
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    grammar = compiled("ab")
    mask = grammar.allocate_vocab_mask(6, 2, "cpu")
    grammar.fill_vocab_mask(mask, 1)
    info = SimpleNamespace(
        grammar_mask=GrammarMask(grammar, mask),
        _apply_pre_grammar_logits_transforms=lambda logits: logits[0].fill_(float("-inf")),
        _apply_post_grammar_logits_transforms=lambda _: None,
    )
    logits = torch.ones(2, 6)
    SamplingBatchInfo.apply_logits_bias(info, logits)
    none = float("-inf")
    assert logits.tolist() == [[none, none, none, none, 0, 0], [1, none, none, none, none, none]]


@pytest.mark.usefixtures("leaving_an_end")
def test_a_grammar_is_over_with_an_end_that_it_does_not_want(compiled: Any):
    """It takes the end and has then ended; another token that it does not allow is an error, as ever."""
    grammar = compiled("abc")
    grammar.accept_token(0)
    with pytest.raises(ValueError, match="not accepted"):
        grammar.accept_token(3)
    assert not grammar.is_terminated()
    grammar.accept_token(5)
    assert grammar.is_terminated()
    assert not grammar.copy().is_terminated()


# --- the detokenizer


def texts_of(tokenizer: Any, manager_class: Any, steps: list[list[int]]) -> tuple[list[str], int]:
    """The texts that a detokenizer makes of an answer's steps, and the most tokens it decodes for one."""
    decoded: list[int] = [0]

    def batch_decode(rows: list[list[int]], **options: Any) -> list[str]:
        decoded.append(sum(map(len, rows)))
        return list(tokenizer.batch_decode(rows, **options))

    manager = manager_class.__new__(manager_class)
    manager.tokenizer = SimpleNamespace(batch_decode=batch_decode, is_fast=True)
    manager.vocab_size, manager.decode_status, manager.disable_tokenizer_batch_decode = 10_240, {}, False
    manager.is_tool_call_parser_gpt_oss = False
    texts = []
    for number, ids in enumerate(steps):
        is_last = number == len(steps) - 1
        batch = SimpleNamespace(
            rids=["a"],
            decoded_texts=[""],
            decode_ids=[ids],
            read_offsets=[0],
            finished_reasons=[{"type": "length", "length": 1} if is_last else None],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        texts += manager._decode_batch_token_id_output(batch)
    return texts, max(decoded)


def test_half_characters_are_not_decoded_again_and_again(tokenizer: Any):
    """The text of 300 of them is SGLang's; a step decodes a hundred tokens at most."""
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    from app.engine.sglang.patches.detokenizer import HandoverDetokenizer

    single = bytes_of(tokenizer)
    steps = [[single[value]] for value in b"ab" + b"\x80" * 300 + "cdé日".encode()]
    theirs, their_most = texts_of(tokenizer, DetokenizerManager, steps)
    ours, our_most = texts_of(tokenizer, HandoverDetokenizer, steps)
    assert "".join(ours) == "".join(theirs) == "ab" + "\ufffd" * 300 + "cdé日"
    assert their_most > 300
    assert our_most <= 100


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab \né日😀\u200d"), max_size=40))
def test_texts_are_those_of_sglang(tokenizer: Any, text: str):
    """Each step of an answer of whole characters gives the text that SGLang's detokenizer gives."""
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    from app.engine.sglang.patches.detokenizer import HandoverDetokenizer

    steps = [[bytes_of(tokenizer)[value]] for value in text.encode()]
    ours = texts_of(tokenizer, HandoverDetokenizer, steps)
    assert ours == texts_of(tokenizer, DetokenizerManager, steps)


@pytest.mark.parametrize(("rids", "is_ours"), [(["a-000", "a-001"], True), (["a-000", "6f1c"], False)])
def test_a_batch_of_our_choices_alone_is_sent_without_its_other_columns(
    monkeypatch: pytest.MonkeyPatch, rids: list[str], is_ours: bool
) -> None:
    """One with a request of SGLang's own path is sent whole, but for the scheduler's timings."""
    import msgspec
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager
    from sglang.srt.managers.io_struct import BatchStrOutput

    from app.engine.sglang.live_choices import StepBatch
    from app.engine.sglang.patches.detokenizer import HandoverDetokenizer

    names = [field.name for field in msgspec.structs.fields(BatchStrOutput)]
    values = dict.fromkeys(names) | {"rids": rids, "output_ids": [array("q", [5]), array("q", [6])]}
    whole = BatchStrOutput(**values)
    monkeypatch.setattr(DetokenizerManager, "handle_batch_token_id_out", lambda _self, _batch: whole)
    sent = HandoverDetokenizer.__new__(HandoverDetokenizer).handle_batch_token_id_out(None)
    assert type(sent) is (StepBatch if is_ours else BatchStrOutput)
    assert (sent.rids, sent.output_ids) == (rids, [[5], [6]])
