"""deploy/prometheus: the alerts name metrics that there are, and say what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.engine.scripted.engine import Script
from tests.support.servers import ROOT, Serve, chat

ALERTS = ROOT / "deploy/prometheus/alerts.yml"
PROMETHEUS_OWN = {"up"}
Series = Mapping[str, str]
"""Values by series, a minute apart, as promtool writes them: `0+3x10` rises by 3 ten times."""
LATE = "tokenring_time_to_first_token_seconds_bucket{{model='m', prefix='miss', le='{}'}}"
LAG = "tokenring_event_loop_lag_seconds_bucket{{le='{}'}}"
CASES: Mapping[str, tuple[Series, Series]] = {
    "NotReady": ({"tokenring_ready": "0x20"}, {"tokenring_ready": "1x20", "up{job='tokenring'}": "1x20"}),
    "EngineRestarts": (
        {"tokenring_outages_total{cause='hung'}": "0 1 2+0x20"},
        {"tokenring_outages_total{cause='hung'}": "0 1 1+0x20"},
    ),
    "EventLoopBusy": (
        {"tokenring_event_loop_cpu_seconds_total": "0+57x20"},
        {"tokenring_event_loop_cpu_seconds_total": "0+40x20"},
    ),
    "EventLoopLag": (
        {LAG.format("0.1"): "0+50x20", LAG.format("0.25"): "0+60x20", LAG.format("+Inf"): "0+60x20"},
        {LAG.format("0.1"): "0+58x20", LAG.format("0.25"): "0+60x20", LAG.format("+Inf"): "0+60x20"},
    ),
    "StoreFailing": ({"tokenring_store_failing": "1x20"}, {"tokenring_store_failing": "0x20"}),
    "StoreDiskLow": (
        {"tokenring_store_disk_free_bytes": "30e9-100e6x90"},
        {"tokenring_store_disk_free_bytes": "300e9-100e6x90"},
    ),
    "StoreWriterLag": (
        {"tokenring_store_writer_lag_seconds": "3x20"},
        {"tokenring_store_writer_lag_seconds": "1x20"},
    ),
    "StoreQueueDepth": ({"tokenring_store_queue_depth": "9000x20"}, {"tokenring_store_queue_depth": "9x20"}),
    "UnsettledRequests": (
        {"tokenring_unsettled_age_seconds": "40x20"},
        {"tokenring_unsettled_age_seconds": "4x20"},
    ),
    "LedgerDiffers": ({"tokenring_ledger_differs": "1x20"}, {"tokenring_ledger_differs": "0x20"}),
    "ScreeningFailures": (
        {"tokenring_safety_failures_total{stage='stream', reason='error', outcome='passed'}": "0x5 1x5"},
        {"tokenring_safety_failures_total{stage='stream', reason='error', outcome='passed'}": "3x20"},
    ),
    "PrefixBreaks": (
        {
            "tokenring_prefix_break_total{cause='system'}": "0+4x60",
            "tokenring_requests_total{outcome='stop'}": "0+9x60",
        },
        {
            "tokenring_prefix_break_total{cause='restarted'}": "0+4x60",
            "tokenring_requests_total{outcome='stop'}": "0+9x60",
        },
    ),
    "Retractions": (
        {"tokenring_engine_retractions_total{model='m'}": "0+1x30"},
        {"tokenring_engine_retractions_total{model='m'}": "0x15 3x15"},
    ),
    "HighTTFT": (
        {LATE.format("5.0"): "0+9x30", LATE.format("10.0"): "0+10x30", LATE.format("+Inf"): "0+10x30"},
        {LATE.format("5.0"): "0+10x30", LATE.format("10.0"): "0+10x30", LATE.format("+Inf"): "0+10x30"},
    ),
    "Refusing": (
        {
            "tokenring_admission_refused_total{model='m'}": "0+1x30",
            "tokenring_admission_admitted_total{model='m'}": "0+9x30",
        },
        {
            "tokenring_admission_refused_total{model='m'}": "0+1x30",
            "tokenring_admission_admitted_total{model='m'}": "0+99x30",
        },
    ),
    "Degraded": ({"tokenring_degraded_step": "1x30"}, {"tokenring_degraded_step": "1x10 0x20"}),
    "ModelAway": (
        {"tokenring_model_ready{model='m'}": "0x30"},
        {"tokenring_model_ready{model='m'}": "0x5 1x25"},
    ),
    "RemoteAnswersLost": (
        {"tokenring_remote_moved_total{outcome='ended'}": "0x10 2x20"},
        {"tokenring_remote_moved_total{outcome='resumed'}": "0x10 2x20"},
    ),
}
"""By alert: series on which it fires, and no other, and series on which none does."""


def alerts() -> list[dict[str, Any]]:
    """The rules as they stand."""
    [group] = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def named_in(expression: str) -> set[str]:
    """Names of metrics in a PromQL expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\boffset \w+|\b(?:by|without)\s*\([^)]*\)", "", expression)
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
        "EventLoopLag",
        "StoreDiskLow",
        "ScreeningFailures",
        "PrefixBreaks",
        "Retractions",
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


def promtool(*arguments: str | Path) -> str:
    """What promtool says, if it finds no fault."""
    if not (tool := shutil.which("promtool")):
        pytest.skip("this machine has no promtool (apt install prometheus)")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_reads_the_rules() -> None:
    """promtool finds no fault in the rules."""
    assert f"{len(alerts())} rules found" in promtool("check", "rules", ALERTS)


def test_every_alert_fires_when_it_should(tmp_path: Path) -> None:
    """On its own series each alert fires, alone; on all quiet ones together none does."""
    assert set(CASES) == {rule["alert"] for rule in alerts()}
    quiet_series: dict[str, str] = {}
    groups = []
    for name, (bad, quiet) in CASES.items():
        assert not quiet_series.keys() & quiet.keys(), "a series of two alerts"
        quiet_series |= quiet
        groups.append(group(name, bad, [{"labels": f'{{alertname="{name}"}}', "value": 1}]))
    groups.append(group("quiet", quiet_series, [], (10, 20, 30, 60, 90)))
    file = tmp_path / "cases.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": groups})
    )
    promtool("test", "rules", file)


def group(
    name: str, series: Series, expected: list[dict[str, Any]], minutes: Sequence[int] = ()
) -> dict[str, Any]:
    """A test of promtool: the alerts that fire in these minutes, or at the end of the series."""
    firing = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "exp_samples": expected}
    checked = minutes or [max(length(values) for values in series.values())]
    inputs = [{"series": key.replace("'", '"'), "values": values} for key, values in series.items()]
    return {
        "name": name,
        "interval": "1m",
        "input_series": inputs,
        "promql_expr_test": [firing | {"eval_time": f"{minute}m"} for minute in checked],
    }


def length(values: str) -> int:
    """Minutes that a series of promtool lasts."""
    return sum(int(item.partition("x")[2] or 0) + 1 for item in values.split()) - 1
