"""The output of a start for a person: its progress, and then how to use the server.

Without a terminal, or with `log_format = "json"`, all of it is log lines.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path

from app.api.http.auth import is_loopback
from app.runtime import Runtime

PROGRESS_S = 5.0
"""Seconds between two messages of a start about its progress."""
READY = """
Tokenring is ready.

  address   {url}    (in a browser, or for OpenAI's SDKs: base_url {url}/v1)
  model     {model}
  keys      {keys}
  data      {data_dir}

Try it:

  curl {url}/v1/chat/completions{authorization} -H 'Content-Type: application/json' -d {body}
"""
FIRST_KEY = """
There is no API key yet, and requests to {host} need one: here is an admin key. It is not shown again.

  KEY={key}

More with `{command} keys create`; replace this one with `{command} keys rotate`.
"""
OPEN = "none needed: there are none, and only this machine can connect"
NEEDED = "needed; KEY=… is one that you have, `{command} keys create --name me{where}` makes one"
FIRST_QUESTION = "What is Tokenring?"


def url_of(host: str, port: int) -> str:
    """The URL of an address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def local_host(host: str) -> str:
    """The address by which a client of this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # replaced, not bound to


def command() -> str:
    """The command `tokenring`, as it can be typed here."""
    path, here = Path(sys.executable).with_name("tokenring"), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def is_keyless(runtime: Runtime) -> bool:
    """True where requests need no key."""
    settings = runtime.settings
    return (
        runtime.keys.empty
        and not settings.api_key
        and not settings.people_sign_in
        and is_loopback(settings.host)
    )


def ready_text(runtime: Runtime, url: str) -> str:
    """The address, the model, whether keys are needed, where the data lies, and a request that works."""
    model, data_dir = runtime.engine.model.id, runtime.settings.data_dir
    body = {"model": model, "messages": [{"role": "user", "content": FIRST_QUESTION}]}
    where = f" --data-dir {shlex.quote(str(data_dir))}"
    return READY.format(
        url=url,
        model=model,
        keys=OPEN if is_keyless(runtime) else NEEDED.format(command=command(), where=where),
        data_dir=data_dir.absolute(),
        authorization="" if is_keyless(runtime) else ' -H "Authorization: Bearer $KEY"',
        body=shlex.quote(json.dumps(body)),
    )


async def log_progress(runtime: Runtime, interval_s: float = PROGRESS_S) -> None:
    """Log what the start is doing, and for how long it has lasted, again and again until it is cancelled."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        await asyncio.sleep(interval_s)
        stage = await runtime.note_start_stage()
        runtime.log.info("starting", stage=stage, elapsed_s=round(loop.time() - began_s))
