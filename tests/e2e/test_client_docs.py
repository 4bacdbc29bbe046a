"""docs/clients.md says the truth: each request that it lists is refused as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.engine.scripted.engine import Script
from tests.support.servers import Serve, chat

PAGE = Path(__file__).parents[2] / "docs/clients.md"
ROW = re.compile(r"^\| `(\{.+\})` \| (\d{3}) `(\w+)`, `([^`]+)` \| .+ \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text("utf-8"))


def test_every_line_of_the_tables_is_read() -> None:
    """No line is in a form that the test below would skip."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert len(lines) == len(ROWS) > 40


@pytest.mark.parametrize(("sent", "status", "code", "param"), ROWS, ids=[row[3] for row in ROWS])
async def test_the_request_is_refused_as_documented(
    serve: Serve, sent: str, status: str, code: str, param: str
) -> None:
    """The rest of the request is one that is answered."""
    served = await serve(Script(tokens=2))
    body = chat(stream=False)
    assert (await served.post(body)).status == 200
    assert (await served.post(body | json.loads(sent))).refusal() == (int(status), code, param)
