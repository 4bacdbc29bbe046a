"""A false SGLang server as a process of its own: `python -m tests.support.false_child PORT`."""

from __future__ import annotations

import asyncio
import sys

from tests.support.false_sglang import FalseServer

TOKENS = 200


async def main(port: int) -> None:
    """Serve until killed."""
    server = FalseServer(port)
    server.tokens, server.pause_s = TOKENS, 0.01
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
