"""The Grafana dashboard: each of its queries has a result, from a server that a real Prometheus scrapes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import yaml

from app.api.metrics.tables import METRICS
from app.engine.scripted.engine import Script
from tests.support.servers import ROOT, WAIT_S, Serve, Served, chat
from tests.support.sse_client import fetch

PROMETHEUS = shutil.which("prometheus")
DASHBOARD = ROOT / "deploy/grafana/dashboards/tokenring.json"
CONFIG = ROOT / "deploy/prometheus/prometheus.yml"
KEY = "admin-key-of-the-test"
NVIDIA_SMI = "#!/bin/sh\necho '0, 87, 70000, 81559, 612.34'\nexec sleep 60\n"
NEEDED_SCRAPES = 3


class Query(NamedTuple):
    """A query of a panel."""

    panel: str
    expression: str


def queries() -> Iterator[Query]:
    """All queries of the dashboard, for all instances and models, over a minute."""
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "1m")
            yield Query(panel["title"], re.sub(r"\$(instance|model)\b", ".*", expression))


@asynccontextmanager
async def prometheus(folder: Path, target: int) -> AsyncIterator[int]:
    """The port of a Prometheus with the configuration of deploy/, which scrapes a server once a second."""
    assert PROMETHEUS is not None
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / name) for name in config["rule_files"]]
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
    job["authorization"] = {"credentials_file": str(folder / "key")}
    (folder / "key").write_text(KEY)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    process = await asyncio.create_subprocess_exec(
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    )
    try:
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ask(port: int, expression: str) -> list[float]:
    """The values of an expression now."""
    answer = await fetch(port, "GET", f"/api/v1/query?query={quote(expression)}")
    assert answer.status == 200, (expression, answer.body)
    return [float(sample["value"][1]) for sample in answer.json()["data"]["result"]]


async def scrapes(port: int) -> float:
    """How often the server was scraped; 0 until Prometheus answers."""
    with contextlib.suppress(ConnectionError):
        return sum(await ask(port, "sum_over_time(up[1m])"))
    return 0.0


async def without_a_number(port: int) -> list[Query]:
    """The queries that have no result, or something else than numbers."""
    results = {query: await ask(port, query.expression) for query in queries()}
    return [query for query, values in results.items() if not values or any(map(math.isnan, values))]


async def serve_some(served: Served) -> None:
    """A few streams, with a prompt that the cache has from the second on, and one that is refused."""
    headers = {"authorization": f"Bearer {KEY}"}
    long = chat("words that are in the prefix cache " * 20)
    await asyncio.gather(*(served.post(body, **headers) for body in (long, long, chat(n=0), chat("hello"))))


@pytest.fixture
def safety() -> str:
    """The screens have panels too."""
    return "on"


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (apt install prometheus)")
async def test_every_query_has_a_result(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some streams each query has samples, and numbers; the GPU is one that a script reports."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    script = Script(rate=500, tokens=70, prefill_s=0.01)
    prices = ({"model": "scripted", "input": "1", "cached_input": "0.5", "output": "2"},)
    served = await serve(script, api_key=KEY, gpu_hour_usd=2.5, prices=prices)
    end_s = time.monotonic() + WAIT_S
    async with prometheus(tmp_path, served.port) as port:
        while await scrapes(port) < NEEDED_SCRAPES:
            assert time.monotonic() < end_s
            await serve_some(served)
        # A scrape that took longer than its second leaves no samples until the next.
        while without := await without_a_number(port):
            assert time.monotonic() < end_s, without
            await serve_some(served)
        assert await ask(port, 'ALERTS{alertstate="firing"}') == []


def test_queries_name_metrics_that_exist() -> None:
    """Each metric of the dashboard is in the tables, and has the labels that are asked for."""
    labels = {metric.name: metric.labels for metric in METRICS}
    for panel, expression in queries():
        for name, selector in re.findall(r"(tokenring_\w+?)(?:_bucket|_count)?\{([^}]*)\}", expression):
            assert name in labels, (panel, name)
            asked = set(re.findall(r"(\w+)=", selector)) - {"instance", "le"}
            assert asked <= set(labels[name]), (panel, name)


def test_panels_have_a_place() -> None:
    """Ids are used once, and no panel covers another."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_dashboard_asks_the_source_that_is_chosen() -> None:
    """No panel names a data source of somebody's own Grafana."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    sources = [panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"]
    assert set(sources) == {"${datasource}"}
