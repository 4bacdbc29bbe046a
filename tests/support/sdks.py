"""OpenAI's SDKs in processes of their own, and what they are asked to do.

e2e/openai_sdk/driver.py and driver.mjs carry a case out and say what they saw.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.engine.scripted.engine import Script
from scripts.support.openai_environments import Offline, newest_python, node_driver
from tests.support.servers import MakeScript

FAST = Script(tokens=4)
DRIVER = Path(__file__).parents[1] / "e2e/openai_sdk/driver.py"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

Seen = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """What an SDK is asked to do, on which server, and what it must have seen."""

    name: str
    op: str
    check: Callable[[Seen], bool]
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] | None = None
    script: MakeScript = FAST
    settings: Mapping[str, Any] = field(default_factory=dict)
    api_key: str = "none"
    max_retries: int = 0


def refused(name: str, error: str, status: int, code: str, **case: Any) -> Case:
    """A case that must raise the SDK's exception for `status`, with our `code` in it."""

    def check(seen: Seen) -> bool:
        # For statuses without a class of their own, Python has APIStatusError and Node APIError.
        classes = ("APIStatusError", "APIError") if error == "APIStatusError" else (error,)
        named = seen["error"] in classes and bool(seen["request_id"])
        return named and (seen["status"], seen["code"]) == (status, code)

    return Case(name, case.pop("op", "create"), check, **case)


def said(text: str, *, finish: str = "stop") -> Callable[[Seen], bool]:
    """One choice with this text."""
    return lambda seen: (seen["text"], seen["finish"]) == ([text], [finish])


class Sdk:
    """One SDK in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        # As a user runs it: no proxy, no key and no base URL of this shell's.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PATH": "/usr/bin:/bin"}
        )
        self.version = self._answer()["sdk"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the driver ended with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    async def run(self, port: int, case: Case, model: str = "scripted") -> dict[str, Any]:
        """What the SDK saw of a case, in a thread: the server is in this loop."""
        messages = [{"role": "user", "content": "Hello there"}]
        question = {
            "op": case.op,
            "params": {"model": model, "messages": messages, **case.params},
            "headers": case.headers and dict(case.headers),
            "base_url": f"http://127.0.0.1:{port}/v1",
            "api_key": case.api_key,
            "max_retries": case.max_retries,
        }
        return await asyncio.to_thread(self._ask, question)

    def close(self) -> None:
        """End the process."""
        with self._process:
            self._process.kill()


def command_of(name: str) -> list[str]:
    """The driver's command for an SDK. Skips where the registry or Node cannot be had."""
    try:
        if name == "node":
            return node_driver()
        python = sys.executable if name == "pinned" else str(newest_python())
        return [python, "-I", str(DRIVER)]
    except Offline as exc:
        pytest.skip(f"the registry cannot be reached, and the SDK was never installed: {exc}")
    except FileNotFoundError as exc:
        pytest.skip(f"not installed: {exc}")
