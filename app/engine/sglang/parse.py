"""Parses the raw text of one choice into `Delta`s, by SGLang's own reasoning, tool-call and logprob code.

`choice_sink` picks the cheapest sink that a request needs: most need no parser at all. The order of
the steps is that of SGLang's `OpenAIServingChat._generate_stream_content`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser

from app.core import Channel, Counts, Delta, FinishReason, ToolCall
from app.engine.grammar.cost import GRAMMAR_ENDED
from app.engine.sglang.grammar import grammar_param
from app.engine.sglang.patches.continued_requests import NOT_CONTINUED
from app.engine.sink import GenerationStream
from app.errors import BadRequest, EngineFailed, EngineOverloaded, GrammarTooSlow, ServingError

_new_tuple = tuple.__new__
REPARSE_FRACTION = 32
"""A call's text is parsed again when it has grown by this fraction of it.

SGLang's parsers read all of a call again with each token: 12 ms a token after 8,000, on the event loop.
"""
MIN_LOGPROB = -9999.0
"""OpenAI's for a token that is out of the question; JSON has no -inf, which a grammar's mask gives."""
RETRY_AFTER_FULL_S = 1
FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def refusal(finish: dict[str, Any], grammar_param: str | None = None) -> ServingError | None:
    """The error in an abort that SGLang itself decided; None for one that we asked for.

    `grammar_param` is the request's parameter that has its grammar.
    """
    status = finish.get("status_code")
    if status is None:
        return None
    message = str(finish.get("message") or "the engine refused the request")
    if message.startswith(GRAMMAR_ENDED):
        words = message.removeprefix(GRAMMAR_ENDED)
        return GrammarTooSlow(
            f"The request was ended because its grammar is too slow: {words}.", param=grammar_param
        )
    if message.startswith(NOT_CONTINUED):
        return EngineFailed(f"The engine was restarted. {message}.", code="engine_restarted")
    if status == HTTPStatus.BAD_REQUEST:
        return BadRequest(message)
    if status in {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS}:
        return EngineOverloaded(message, retry_after_s=RETRY_AFTER_FULL_S)
    return EngineFailed(message)


class PlainChoice:
    """A choice whose text is all answer: no parser, no logprobs."""

    __slots__ = ("_grammar_param", "_out", "counts", "index")

    def __init__(
        self, index: int, out: GenerationStream, prompt_tokens: int, grammar_param: str | None = None
    ) -> None:
        self.index = index
        self._out = out
        self._grammar_param = grammar_param
        self.counts = Counts(prompt_tokens)

    def take(
        self,
        text: str,
        token_ids: Any,
        finish: dict[str, Any] | None,
        counts: Counts,
        batch: Any,
        row: int,
    ) -> None:
        del batch, row
        self.counts = counts
        if finish is None:
            # What `Delta(...)` does, without its Python-level call: this line runs once per token.
            values = (self.index, "text", text, token_ids, counts, None, None, None, None)
            self._out.put(_new_tuple(Delta, values))
        elif (error := refusal(finish, self._grammar_param)) is not None:
            self._out.fail(error)
        else:
            reason = FINISH_REASONS[finish["type"]]
            matched = finish.get("matched")
            self._out.put_final(
                Delta(self.index, "text", text, token_ids, counts, reason, matched_stop=matched)
            )

    def fail(self, error: ServingError) -> None:
        self._out.fail(error)


class _Fragment(NamedTuple):
    """A parsed fragment of text that becomes a delta."""

    channel: Channel
    text: str
    tool: ToolCall | None = None


class ParsedChoice:
    """A choice with reasoning, tool calls or logprobs in it."""

    def __init__(
        self, index: int, out: GenerationStream, prompt_tokens: int, chat: Any, *, request: Any
    ) -> None:
        self.index = index
        self.counts = Counts(prompt_tokens)
        self._out = out
        self._chat = chat
        self._request = request
        self._reasoning: dict[int, Any] = {}
        self._tools: Any = None
        self._unparsed = ""
        self._before_call: _TextBeforeCall | None = None
        self._called_tools = False
        self._reads_reasoning = bool(chat.reasoning_parser and request.separate_reasoning)
        self._reads_tools = chat._tool_call_parsing_active(request)  # noqa: SLF001

    def take(
        self,
        text: str,
        token_ids: Any,
        finish: dict[str, Any] | None,
        counts: Counts,
        batch: Any,
        row: int,
    ) -> None:
        self.counts = counts
        if finish is not None and (error := refusal(finish, grammar_param(self._request))) is not None:
            self._out.fail(error)
            return
        try:
            finish_type = finish["type"] if finish else None
            fragments = list(self._fragments(text, finish_type, gathered=len(token_ids) > 1))
            logprobs = self._logprobs(batch, row) if self._request.logprobs else None
        except Exception as exc:  # noqa: BLE001  # SGLang's parsers raise anything
            self._out.put(Delta(self.index, "text", "", token_ids, counts))  # generated all the same
            self._out.fail(EngineFailed(f"the model's output could not be parsed: {type(exc).__name__}"))
            return
        self._emit(fragments, token_ids, finish, logprobs)

    def fail(self, error: ServingError) -> None:
        self._out.fail(error)

    def _emit(
        self,
        fragments: list[_Fragment],
        token_ids: Any,
        finish: dict[str, Any] | None,
        logprobs: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """One delta per fragment; the ids and logprobs go with the first, the finish with the last."""
        if not fragments:
            fragments.append(_Fragment("text", ""))
        last = len(fragments) - 1
        for number, fragment in enumerate(fragments):
            final = finish is not None and number == last
            delta = Delta(
                choice=self.index,
                channel=fragment.channel,
                text=fragment.text,
                token_ids=token_ids if number == 0 else (),
                counts=self.counts,
                finish_reason=self._finish_reason(finish) if final and finish else None,
                logprobs=logprobs if number == 0 else None,
                tool=fragment.tool,
                matched_stop=finish.get("matched") if final and finish else None,
            )
            (self._out.put_final if final else self._out.put)(delta)

    def _finish_reason(self, finish: dict[str, Any]) -> FinishReason:
        reason = FINISH_REASONS[finish["type"]]
        return "tool_calls" if reason == "stop" and self._called_tools else reason

    def _fragments(self, text: str, finish_type: str | None, *, gathered: bool) -> Iterator[_Fragment]:
        if self._reads_reasoning:
            thought, text = self._chat._process_reasoning_stream(  # noqa: SLF001
                self.index, text, self._reasoning, {}, self._request, finish_type
            )
            if thought:
                yield _Fragment("reasoning", thought)
        if self._reads_tools:
            yield from self._tool_fragments(text, finish_type, gathered=gathered)
        elif text:
            yield _Fragment("text", text)

    def _tool_fragments(self, text: str, finish_type: str | None, *, gathered: bool) -> Iterator[_Fragment]:
        if self._tools is None:
            self._tools = self._tool_parser()
            self._before_call = _TextBeforeCall(getattr(self._tools, "detector", None))
        gathered = gathered or bool(self._unparsed) or finish_type is not None
        self._unparsed += text
        if finish_type is None and len(self._unparsed) * REPARSE_FRACTION < self._unfinished():
            return
        text, self._unparsed = self._unparsed, ""
        ended = finish_type not in {None, "abort"}
        answer, calls = self._parse_tools(text, gathered=gathered, ended=ended)
        if answer:
            yield _Fragment("text", answer)
        history = self._chat._get_history_tool_calls_cnt(self._request) if calls else 0  # noqa: SLF001
        for call in calls:
            self._called_tools = True
            call_id = self._chat._process_tool_call_id(call, history) if call.name else None  # noqa: SLF001
            tool = ToolCall(call.tool_index, call_id, call.name or None)
            yield _Fragment("tool", call.parameters, tool)
        if ended:  # SGLang closes the open arguments; of a stopped call they would be invented
            yield from self._unstreamed_arguments()

    def _unfinished(self) -> int:
        """Characters that the parser keeps and reads again with each fragment."""
        detector = getattr(self._tools, "detector", self._tools)
        return len(getattr(detector, "_buffer", ""))

    def _parse_tools(self, text: str, *, gathered: bool, ended: bool) -> tuple[str, list[Any]]:
        if isinstance(self._tools, JsonArrayParser):
            return self._parse_fragment(text, gathered=gathered)
        assert self._before_call is not None
        answer, calls = "", []
        for fragment in self._before_call.fragments(text):
            new_answer, new_calls = self._parse_fragment(fragment, gathered=gathered)
            answer += new_answer
            calls += new_calls
        if ended:
            end_answer, end_calls = self._tools.parse_stream_end()
            answer += end_answer
            calls += end_calls
        answer += self._before_call.lost(answer, ended=ended)
        return answer, calls

    def _parse_fragment(self, fragment: str, *, gathered: bool) -> tuple[str, list[Any]]:
        """The parser's result. Of several tokens it gives one call's name, or arguments, a time."""
        answer, calls = self._parse_step(fragment)
        step = calls
        while gathered and any(call.name or call.parameters for call in step) and self._unfinished():
            more, step = self._parse_step("")
            answer += more
            calls = calls + step
        return answer, calls

    def _parse_step(self, fragment: str) -> tuple[str, list[Any]]:
        if isinstance(self._tools, JsonArrayParser):
            tools = self._chat._effective_tools(self._request)  # noqa: SLF001
            result = self._tools.parse_streaming_increment(fragment, tools)
            return result.normal_text or "", result.calls
        answer, calls = self._tools.parse_stream_chunk(fragment)
        return answer or "", calls

    def _tool_parser(self) -> Any:
        """The tool parser as SGLang chooses it: JSON where the grammar forces it, or the model's."""
        parser = FunctionCallParser(
            tools=self._chat._effective_tools(self._request),  # noqa: SLF001
            tool_call_parser=self._chat.tool_call_parser,
            tokenizer=self._chat.tokenizer_manager.tokenizer,
        )
        detector = parser.detector
        is_native = detector.supports_structural_tag() or detector.parses_required_natively()
        # A named tool is a required one here (`prepare_tools`).
        return parser if is_native or self._request.tool_choice != "required" else JsonArrayParser()

    def _unstreamed_arguments(self) -> Iterator[_Fragment]:
        """The arguments of the last call that the parser has but did not give out."""
        frame = self._chat._check_for_unstreamed_tool_args(  # noqa: SLF001
            self._tools, {"meta_info": {"id": ""}}, self._request, self.index
        )
        if frame:
            chunk = orjson.loads(frame.removeprefix("data: "))
            call = chunk["choices"][0]["delta"]["tool_calls"][0]
            yield _Fragment("tool", call["function"]["arguments"], ToolCall(call["index"]))

    def _logprobs(self, batch: Any, row: int) -> list[dict[str, Any]] | None:
        """OpenAI's `logprobs.content` entries of this step's tokens.

        Not SGLang's `_process_streaming_logprobs`: with several tokens in one step that gives each
        the alternatives of the first.
        """
        if batch is None or not batch.output_token_logprobs_val:
            return None
        values, ids = batch.output_token_logprobs_val[row], batch.output_token_logprobs_idx[row]
        texts = self._texts(ids)
        entries = [_entry(text, value) for text, value in zip(texts, values, strict=True)]
        count = self._request.top_logprobs or 0
        for step, entry in enumerate(entries):
            top: list[dict[str, Any]] = []
            if count:
                top_values = batch.output_top_logprobs_val[row][step] or []
                top_ids = batch.output_top_logprobs_idx[row][step] or []
                top = [_entry(t, v) for t, v in zip(self._texts(top_ids), top_values, strict=True)]
            entry["top_logprobs"] = top
        return entries

    def _texts(self, ids: Sequence[int]) -> list[str]:
        # One list per id: transformers 5 decodes a flat list to one string.
        tokenizer = self._chat.tokenizer_manager.tokenizer
        texts: list[str] = tokenizer.batch_decode([[token_id] for token_id in ids])
        return texts


class _TextBeforeCall:
    """Keeps what SGLang's base detector loses of the text before a tool call.

    It drops text that shares its buffer with the marker of a call, and what it holds back as the
    possible start of a marker when the answer ends.
    """

    def __init__(self, detector: Any) -> None:
        self._marker: str = getattr(detector, "bot_token", None) or ""
        self._seen_marker = not self._marker
        self._held = ""
        self._inputs: list[str] = []
        self._parsed: list[str] = []

    def fragments(self, text: str) -> list[str]:
        """New text, cut so that a marker shares no fragment with the text before it."""
        if self._seen_marker:
            return [text]
        self._inputs.append(text)
        text = self._held + text
        at = text.find(self._marker)
        self._seen_marker = at >= 0
        cut = at if self._seen_marker else len(text) - _overlap(text, self._marker)
        self._held = "" if self._seen_marker else text[cut:]
        fragments = (text[:cut], text[cut:] if self._seen_marker else "")
        return [fragment for fragment in fragments if fragment]

    def lost(self, answer: str, *, ended: bool) -> str:
        """The text that an answer without a call still lacks at its end."""
        if self._seen_marker:
            return ""
        self._parsed.append(answer)
        if not ended:
            return ""
        received, parsed = "".join(self._inputs), "".join(self._parsed)
        return received[len(parsed) :] if received.startswith(parsed) else ""


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the start of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(text.encode())}


def choice_sink(index: int, out: GenerationStream, prompt_tokens: int, chat: Any, *, request: Any) -> Any:
    """The cheapest sink that can parse this request's output."""
    reasoning = chat.reasoning_parser and request.separate_reasoning
    tools = chat._tool_call_parsing_active(request)  # noqa: SLF001
    if reasoning or tools or request.logprobs:
        return ParsedChoice(index, out, prompt_tokens, chat, request=request)
    return PlainChoice(index, out, prompt_tokens, grammar_param(request))
