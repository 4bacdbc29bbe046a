"""The benchmarks' reader of recorded answers: the same frames wherever the reads were cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.benchmarks.sse import Read, parse_answer
from scripts.benchmarks.streams import stream_result

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(delta=None, **fields):
    """One chat.completion.chunk as JSON."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    return json.dumps({"id": "x", "choices": choices, **fields}).encode()


def usage(tokens):
    """The chunk that ends a stream with its counts."""
    return chunk(usage={"prompt_tokens": 9, "completion_tokens": tokens, "prompt_tokens_details": None})


FRAMES = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "one "}),
    chunk({"reasoning_content": "two\n\nlines"}),
    chunk({"content": "drei € "}),
    usage(3),
    b"[DONE]",
]


def encode(frames, cuts=(), comment=b": ping\n"):
    """The answer's bytes; the body is cut into HTTP chunks at `cuts`, anywhere in it."""
    body = b"".join(comment + b"id: %d\ndata: %s\n\n" % (i, frame) for i, frame in enumerate(frames))
    edges = [0, *sorted(cut % len(body) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(edges) if b > a]
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def in_reads(answer, cuts=()):
    """The bytes as reads cut at `cuts`, the n-th read at n seconds."""
    edges = [0, *sorted(cut % len(answer) for cut in cuts), len(answer)]
    pieces = [answer[a:b] for a, b in pairwise(edges)]
    return [Read(float(number), piece) for number, piece in enumerate(pieces)]


@given(st.lists(st.integers(0, 5000)), st.lists(st.integers(0, 5000)))
def test_frames_do_not_depend_on_where_chunks_and_reads_are_cut(chunk_cuts, read_cuts):
    """Any HTTP chunking and any reads give the same frames, at times that never go back."""
    answer = parse_answer(in_reads(encode(FRAMES, chunk_cuts), read_cuts))
    assert answer.status == 200
    assert [frame.data for frame in answer.frames] == FRAMES
    times = [frame.at_s for frame in answer.frames]
    assert times == sorted(times)


@given(st.lists(st.integers(0, 5000), max_size=3), st.integers(1, 400))
def test_a_frame_arrives_with_the_read_that_completes_it(chunk_cuts, keep):
    """A frame whose last byte is not read yet is not a frame yet."""
    wire = encode(FRAMES, chunk_cuts)
    first = wire[: max(len(HEAD), len(wire) - keep)]
    seen = parse_answer([Read(1.0, first)]).frames
    whole = parse_answer([Read(1.0, first), Read(2.0, wire[len(first) :])]).frames
    assert [frame.at_s for frame in whole] == [1.0] * len(seen) + [2.0] * (len(FRAMES) - len(seen))


def test_result_counts_content_and_times_it():
    """Role, usage and [DONE] are no content; TTFT ends at the first text, TPOT spans the rest."""
    reads = in_reads(HEAD, ()) + [
        Read(10.0 + n, b"%x\r\ndata: %s\n\n\r\n" % (len(frame) + 8, frame)) for n, frame in enumerate(FRAMES)
    ]
    result = stream_result(9.5, reads, expected_tokens=3)
    assert result.error == ""
    assert (result.content_frames, result.completion_tokens, result.data_frames) == (3, 3, 6)
    assert result.ttft_s == 1.5
    assert result.tpot_s == 1.0
    assert result.itl_s == [1.0, 1.0]


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (FRAMES[:-1], "did not end with [DONE]"),
        ([*FRAMES[:-2], usage(2), b"[DONE]"], "2 tokens in the usage, 3 asked for"),
        ([*FRAMES[:2], b'{"error": {"code": "engine_failed"}}', b"[DONE]"], "error event"),
        ([FRAMES[0], usage(3), b"[DONE]"], "no content"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(frames, error):
    """A run with a short, broken or silent stream must not become a number in a table."""
    assert error in stream_result(0.0, in_reads(encode(frames)), expected_tokens=3).error


def test_an_http_error_is_told_with_its_body():
    """A refusal is reported with its status and what the server said."""
    wire = b'HTTP/1.1 404 Not Found\r\ncontent-length: 14\r\n\r\n{"error": "x"}'
    error = stream_result(0.0, in_reads(wire, [30, 50]), expected_tokens=3).error
    assert "404" in error
    assert "error" in error


def test_a_connection_that_ends_in_the_head_is_an_error():
    """A cut head is told as such, not as a parser's exception."""
    assert "head" in stream_result(0.0, [Read(0.0, HEAD[:20])], expected_tokens=3).error
