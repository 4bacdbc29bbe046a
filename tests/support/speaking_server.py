"""A server for tests of the console, in a thread beside the browser's test; it says what it is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.core import ChatRequest, ToolCall
from app.engine.scripted.engine import Script
from app.messages import content_text
from app.settings import Settings
from tests.support.held_answers import HeldEngine
from tests.support.screens import Piece, SpeakingEngine, word_models, words
from tests.support.servers import Served, serve_here

SLOWLY, QUICKLY = "slowly", "quickly"
"""A question with such a word is answered at 25 or 200 tokens a second, another as fast as the loop turns."""


class HeldSpeakingEngine(HeldEngine, SpeakingEngine):
    """Says what it is told, and stops in the middle of it for as long as it is held."""

    held = False

    def is_held(self) -> bool:
        return self.held


class SpeakingServer:
    """Answers a question with the question; its screens know words (tests.support.screens)."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.key = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        in_force = Settings(port=0, data_dir=folder / "data", safety="on", **settings)
        models = word_models(folder / "models")
        self.served: Served = self.run(
            serve_here(script_of, in_force, engine_type=engine, load_models=lambda: models)  # type: ignore[arg-type]
        )

    @property
    def url(self) -> str:
        """The address of the console."""
        return f"http://127.0.0.1:{self.served.port}/"

    @property
    def engine(self) -> HeldSpeakingEngine:
        """The engine, which notes its prompts."""
        assert isinstance(self.served.engine, HeldSpeakingEngine)
        return self.served.engine

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Meanwhile an answer stops behind its first tokens; after it, it goes on."""
        self.engine.held = True
        try:
            yield
        finally:
            self.engine.held = False

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of something done in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that answers a request; fails on an error."""
        answer = httpx.request(method, self.url.rstrip("/") + path, json=body, timeout=20)
        assert answer.is_success, (answer.status_code, answer.text)
        return answer.json()

    def close(self) -> None:
        """Stop it."""
        self.run(self.served.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def engine(script: Script, *, on_death: Callable[[str], None]) -> HeldSpeakingEngine:
    """The engine of a server."""
    return HeldSpeakingEngine(script, speech, on_death)


def asked(request: ChatRequest) -> str:
    """The newest question."""
    messages = request.body["messages"]
    return next(content_text(m["content"]) for m in reversed(messages) if m["role"] == "user")


def script_of(request: ChatRequest) -> Script:
    """The pace of an answer."""
    text = asked(request)
    return Script(rate=25 if SLOWLY in text else 200 if QUICKLY in text else 0)


def speech(request: ChatRequest, _choice: int) -> list[Piece]:
    """The question; a continued answer is what is left of it. `think` and `call` ask for more than text."""
    text = asked(request)
    last = request.body["messages"][-1]
    if last["role"] == "assistant":
        return words(text.removeprefix(str(last["content"])))
    thoughts = words("thinking about it ", "reasoning") if "think" in text else []
    call = [
        Piece("", "tool", ToolCall(0, "call_1", "get_weather")),
        Piece('{"city": "Paris"}', "tool", ToolCall(0)),
    ]
    return [*thoughts, *words(text), *(call if "call" in text else [])]
