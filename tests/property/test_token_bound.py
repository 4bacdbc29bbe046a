"""No text has fewer tokens than it is refused for, whatever the tokenizer does with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import app.engine
from app.engine.token_bound import SLICE_CHARS, TokenBound, token_bound

BUILTIN = Path(app.engine.__file__).parent / "builtin" / "tokenizer.json"
LONGEST_RUN = 128
"""Of spaces, as in Llama 3's and Qwen's vocabularies."""
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{value:02X}>" for value in range(256)]
META = "\u2581"
SPECIAL = "<|special|>"

TEXT = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.text("abc \u0301\u0345\u1100\u1161\u11a8\u212a\uff21\U0001d6c2\u0300\u0313\u03b1", max_size=12),
        st.sampled_from([SPECIAL, "<|wide|>", META, "\u00a0", "\u3000", "\r\n", "the ", "\u4e2d\u6587"]),
        st.builds(
            lambda run, times: run * times, st.sampled_from([" ", "\n", "=", "=-", "a"]), st.integers(1, 300)
        ),
    ),
    max_size=12,
).map("".join)


def merges_of(word: str) -> list[tuple[str, str]]:
    """Merges that make a word from its characters, from the left."""
    return [(word[:end], word[end]) for end in range(1, len(word))]


def byte_level(*steps: normalizers.Normalizer, stripping: bool = False) -> Tokenizer:
    """Bytes, some words, and runs as long as those of large vocabularies."""
    words = ["\u0120" * LONGEST_RUN, "=" * 64, "the", "\u00e4\u00b8\u0143"]
    merges = [merge for word in words for merge in merges_of(word)]
    vocabulary = {
        piece: number for number, piece in enumerate([*ALPHABET, *dict.fromkeys(a + b for a, b in merges)])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+| +|[^\p{L} ]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if steps:
        tokenizer.normalizer = normalizers.Sequence(list(steps))
    tokenizer.add_special_tokens([SPECIAL, AddedToken("<|wide|>", lstrip=stripping, rstrip=stripping)])
    return tokenizer


def unigram(*steps: normalizers.Normalizer, byte_fallback: bool = True) -> Tokenizer:
    """As sentencepiece makes them: spaces are letters, bytes stand for what is unknown."""
    pieces = ["<unk>", *BYTES, META, "a", "b", "t", "h", "e", f"{META}the", "=" * 16, META * 16, "the"]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -float(n % 7)) for n, piece in enumerate(pieces)], 0, byte_fallback)
    )
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([SPECIAL, "<|wide|>"])
    return tokenizer


def llama_2() -> Tokenizer:
    """Merges over whole text, spaces replaced, bytes for what is unknown."""
    words = [META * 16, f"{META}the", "=" * 16]
    merges = [merge for word in words for merge in merges_of(word)]
    pieces = ["<unk>", *BYTES, META, *"the=", *dict.fromkeys(a + b for a, b in merges)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(META), normalizers.Replace(" ", META)])
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def trained() -> Tokenizer:
    """A vocabulary learned from this repository's own text, runs and all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=ALPHABET, show_progress=False)
    texts = [path.read_text() for path in sorted(BUILTIN.parents[1].glob("*.py"))]
    tokenizer.train_from_iterator(["    " * 40, "=" * 80, *texts], trainer)
    return tokenizer


MAKES = {
    "built-in": lambda: Tokenizer.from_file(str(BUILTIN)),
    "byte level": byte_level,
    "byte level, NFC": lambda: byte_level(normalizers.NFC()),
    "byte level, NFKC": lambda: byte_level(normalizers.NFKC()),
    "byte level, NFD and lower case": lambda: byte_level(normalizers.NFD(), normalizers.Lowercase()),
    "byte level, accents stripped": lambda: byte_level(normalizers.NFD(), normalizers.StripAccents()),
    "byte level, special tokens that swallow spaces": lambda: byte_level(stripping=True),
    "byte level, ends stripped": lambda: byte_level(normalizers.Strip()),
    "trained, NFC": trained,
    "unigram": lambda: unigram(normalizers.NFKC()),
    "unigram, spaces collapsed": lambda: unigram(
        normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")
    ),
    "merged as a whole": llama_2,
}


@cache
def made(name: str) -> tuple[Tokenizer, TokenBound]:
    """A tokenizer and its bound."""
    tokenizer = MAKES[name]()
    normalizer = tokenizer.normalizer
    return tokenizer, token_bound(tokenizer.to_str(), normalizer and normalizer.normalize_str)


def sliced(bound: TokenBound) -> Iterator[TokenBound]:
    """The same bound, measured in slices of several sizes."""
    for chars in (1, 7, 50, SLICE_CHARS):
        yield replace(bound, slice_chars=chars)


@pytest.mark.parametrize("name", MAKES)
@settings(max_examples=250, deadline=None)
@given(TEXT)
def test_a_text_has_no_fewer_tokens_than_its_bound(name: str, text: str):
    """What the bound says is never more than the tokenizer makes, so nothing that fits is refused."""
    tokenizer, bound = made(name)
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    for each in sliced(bound):
        assert each.over(text, tokens) == 0
        assert each.over(text, 0) <= tokens


@pytest.mark.parametrize("name", MAKES)
def test_a_text_of_megabytes_is_seen_to_be_too_long(name: str):
    """English, Chinese and code of 3 MB are over a context of 8,192 tokens in every tokenizer here."""
    _, bound = made(name)
    for text in (
        "the quick brown fox. ",
        "\u4e2d\u6587\u7684\u6587\u5b57\u3002",
        "def f(x): return {x: [1]}\n",
    ):
        assert bound.over(text * (3_000_000 // len(text.encode())), 8192) > 8192


def test_the_bound_of_the_built_in_tokenizer_is_near_its_longest_word():
    """Its longest token has 17 bytes, so 8,192 tokens are at most 139,264 bytes."""
    _, bound = made("built-in")
    assert bound.max_bytes == 17
    assert bound.over("x" * 17 * 8192, 8192) == 0
    assert bound.over("x" * 17 * 8193, 8192) == 8193


@pytest.mark.parametrize(
    "make",
    [
        lambda: unigram(normalizers.NFKC(), byte_fallback=False),
        lambda: Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        lambda: Tokenizer(
            models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
        ),
        lambda: byte_level(normalizers.Replace(Regex("a+"), "a")),
        lambda: byte_level(normalizers.Replace("aa", "")),
    ],
)
def test_a_tokenizer_that_may_lose_text_has_no_bound(make):
    """Where any length of text may become a single token, nothing is refused by its length."""
    tokenizer = make()
    normalizer = tokenizer.normalizer
    bound = token_bound(tokenizer.to_str(), normalizer and normalizer.normalize_str)
    assert bound.over("a" * 1_000_000, 10) == 0
