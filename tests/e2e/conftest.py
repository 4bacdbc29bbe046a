"""OpenAI's SDKs, each started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.sdks import Sdk, command_of


@pytest.fixture
def safety() -> str:
    """As users have it."""
    return "on"


@pytest.fixture(scope="session", params=["pinned", "newest", "node"])
def sdk(request: pytest.FixtureRequest) -> Iterator[Sdk]:
    """Each SDK in turn."""
    started = Sdk(command_of(request.param))
    yield started
    started.close()


@pytest.fixture(scope="session")
def node() -> Iterator[Sdk]:
    """The Node SDK alone."""
    started = Sdk(command_of("node"))
    yield started
    started.close()
