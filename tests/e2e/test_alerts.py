"""deploy/prometheus: the alerts name metrics that there are, and say what to do."""

from __future__ import annotations

import re
from typing import Any

import yaml

from app.engine.scripted.engine import Script
from tests.support.servers import ROOT, Serve, chat

ALERTS = ROOT / "deploy/prometheus/alerts.yml"
PROMETHEUS_OWN = {"up"}


def alerts() -> list[dict[str, Any]]:
    """The rules as they stand."""
    [group] = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def named_in(expression: str) -> set[str]:
    """Names of metrics in a PromQL expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|without)\s*\([^)]*\)", "", expression)
    return set(re.findall(r"[a-z_]+(?!\w|\s*\()", bare)) - {"or", "and", "unless"}


async def test_alerts_name_metrics_that_exist(serve: Serve):
    """Every metric in an alert's expression is one that a server has, some only with a remote engine."""
    served = await serve(Script(tokens=3))
    await served.post(chat())
    text = (await served.call("GET", "/metrics")).body.decode()
    existing = set(re.findall(r"^(?:# HELP )?(\w+)", text, re.MULTILINE)) | PROMETHEUS_OWN
    for alert in alerts():
        names = named_in(alert["expr"])
        assert names, alert["alert"]
        assert names <= existing, alert["alert"]


def test_alerts_say_what_to_do():
    """Each alert has a time to wait, a severity, a summary and what to do."""
    rules = alerts()
    assert {rule["alert"] for rule in rules} == {
        "NotReady",
        "EngineRestarts",
        "EventLoopBusy",
        "StoreFailing",
        "StoreWriterLag",
        "StoreQueueDepth",
        "UnsettledRequests",
        "LedgerDiffers",
        "HighTTFT",
        "Refusing",
        "Degraded",
        "ModelAway",
        "RemoteAnswersLost",
    }
    for rule in rules:
        assert re.fullmatch(r"\d+[ms]", rule["for"])
        assert rule["labels"]["severity"] in {"page", "warn"}
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_example_scrape_finds_the_alerts():
    """prometheus.yml loads the file that is beside it, and scrapes the job the alerts name."""
    config = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text("utf-8"))
    assert config["rule_files"] == [ALERTS.name]
    [job] = config["scrape_configs"]
    assert f'job="{job["job_name"]}"' in ALERTS.read_text("utf-8")
