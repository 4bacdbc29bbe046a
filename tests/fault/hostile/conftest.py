"""Real SGLang for two owners, started once for each file of attacks on the step that they share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.preloaded import Preloaded
from tests.support.sglang_owners import Node, two_owners


@pytest.fixture(scope="module")
async def node(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any, preloaded: Preloaded | None
) -> AsyncIterator[Node]:
    """The server, after its first answer."""
    async with two_owners(tmp_path_factory.mktemp("owners"), preloaded) as node:
        yield node
