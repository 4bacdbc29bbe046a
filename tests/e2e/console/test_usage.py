"""The page of usage in a browser: its plots and its table show the ledger's numbers."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.support.console import ConsoleServer, axe, module_of, open_signed_in

PRICES = '[[prices]]\nmodel = "scripted"\ninput = "0.0005"\ncached_input = "0.00005"\noutput = "0.0017"\n'


@pytest.fixture(scope="module")
def server_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A server with prices."""
    path = tmp_path_factory.mktemp("settings") / "tokenring.toml"
    path.write_text(PRICES)
    return ("--config", str(path))


@pytest.fixture(scope="module")
def keys(server: ConsoleServer) -> dict[str, str]:
    """Keys of two people, who have asked something, and of one who has not."""
    made = {
        "ann": server.new_key("ann", owner="ann", budget_usd="0.0004"),
        "=bob": server.new_key("=bob", owner="bob"),
        "eve": server.new_key("eve", owner="eve"),
    }
    for name, times in (("ann", 3), ("=bob", 2)):
        for number in range(times):
            body = {"messages": [{"role": "user", "content": f"question {number} of {name}"}]}
            server.call("POST", "/api/chat/completions", {"model": "scripted", **body}, made[name])
    return made


def usage(context: BrowserContext, server: ConsoleServer, key: str) -> Page:
    """The page of usage, once it has been read."""
    page = context.new_page()
    open_signed_in(page, server.url, key)
    page.get_by_role("link", name="Usage").click()
    expect(page.locator("[aria-busy=false]")).to_be_visible()
    return page


def table(page: Page) -> list[list[str]]:
    """The cells of the table, without its head."""
    cells = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    return [
        [str(cell) for cell in row]
        for row in page.locator(".table-scroll :is(tbody, tfoot) tr").evaluate_all(cells)
    ]


def written(sums: dict[str, Any]) -> list[str]:
    """Sums of the API as the table writes them."""
    names = ("requests", "input_tokens", "cached_tokens", "output_tokens")
    return [*(f"{sums[name]:,}" for name in names), f"${sums['cost_micro_usd'] / 1e6:.6f}"]


def test_the_table_is_the_ledger(context: BrowserContext, server: ConsoleServer, keys: dict[str, str]):
    """By day, model and key, with the sum; an admin key sees all, any other its owner's."""
    for key, groups in (
        (server.key, ("day", "model", "key", "owner")),
        (keys["ann"], ("day", "model", "key")),
    ):
        page = usage(context, server, key)
        for group in groups:
            page.get_by_label("Group by").select_option(group)
            expect(page.get_by_role("region", name=f"Usage by {group}")).to_be_visible()
            report = server.call("GET", f"/api/usage?group_by={group}", key=key)
            *rows, total = table(page)
            expected = {
                f"{g['key_name']} ({g['key']})" if group == "key" else g[group]: written(g)
                for g in report["groups"]
            }
            assert {name: cells for name, *cells in rows} == expected
            assert total == ["Total", *written(report)]


def test_the_plots_are_the_ledger(context: BrowserContext, server: ConsoleServer, keys: dict[str, str]):
    """Their words and their legends; a bar is as high as its share of the scale."""
    page = usage(context, server, keys["ann"])
    report = server.call("GET", "/api/usage", key=keys["ann"])
    tokens, cost = page.locator(".plot").all()
    total = report["input_tokens"] + report["output_tokens"]
    expect(tokens.get_by_role("img")).to_have_attribute("aria-label", re.compile(f"in all {total:,}\\."))
    expect(cost.locator("figcaption")).to_contain_text(f"${report['cost_micro_usd'] / 1e6:.6f}".rstrip("0"))
    computed = report["input_tokens"] - report["cached_tokens"]
    legend = [f"{computed:,}", f"{report['cached_tokens']:,}", f"{report['output_tokens']:,}"]
    expect(tokens.locator(".legend b")).to_have_text(legend)
    low, high = tokens.locator("path.plot-1"), tokens.locator("path.plot-3")
    heights = [path.evaluate("path => path.getBBox().height") for path in (low, high)]
    assert heights[0] / heights[1] == pytest.approx(computed / report["output_tokens"], rel=0.01)
    tokens.locator("svg").hover(position={"x": 60, "y": 100})
    expect(tokens.locator("figcaption")).not_to_contain_text("in all")


def test_the_budget_says_what_is_left(context: BrowserContext, server: ConsoleServer, keys: dict[str, str]):
    """For a key that has one; another key has no bar."""
    page = usage(context, server, keys["ann"])
    spent = server.call("GET", "/api/usage", key=keys["ann"])["cost_micro_usd"]
    meter = page.get_by_role("meter", name="Part of the budget that is used")
    assert float(meter.get_attribute("value") or 0) == pytest.approx(spent / 400, rel=1e-3)
    expect(page.get_by_role("region", name="Budget")).to_contain_text("left")
    assert usage(context, server, keys["=bob"]).get_by_role("meter").count() == 0


def test_another_period(context: BrowserContext, server: ConsoleServer, keys: dict[str, str]):
    """Nothing last month; seven days and a range have today's numbers; a wrong range is an error."""
    page = usage(context, server, keys["ann"])
    today = table(page)
    period = page.get_by_label("Period")
    period.select_option("last")
    expect(page.get_by_text("Nothing was used in this period.")).to_be_visible()
    assert axe(page) == []
    period.select_option("week")
    expect(page.locator("tfoot")).to_be_visible()
    assert table(page) == today
    period.select_option("range")
    with page.expect_response("**/api/usage?from=2026-01-01*"):
        page.get_by_label("From", exact=True).fill("2026-01-01")
    expect(page.get_by_role("img", name="Tokens by day")).to_have_attribute(
        "aria-label", re.compile(r"bars for \d{3,} days")
    )
    assert table(page) == today
    page.get_by_label("From", exact=True).fill("2999-01-01")
    expect(page.get_by_role("alert")).to_contain_text("Choose a first day")


def test_the_file_has_every_row(context: BrowserContext, server: ConsoleServer, keys: dict[str, str]):
    """As whole numbers; a name that a spreadsheet would compute is text."""
    page = usage(context, server, server.key)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    report = server.call("GET", "/api/usage")
    assert sum(int(row["cost_micro_usd"]) for row in rows) == report["cost_micro_usd"]
    assert sum(int(row["input_tokens"]) for row in rows) == report["input_tokens"]
    assert {row["key_name"] for row in rows} == {"ann", "'=bob"}
    assert keys["ann"].split("-")[1] not in json.dumps([row["key_name"] for row in rows])


def test_nobody_is_kept_out(context: BrowserContext, server: ConsoleServer, keys: dict[str, str]):
    """No violation of accessibility, light, dark, and on a telephone without scrolling sideways."""
    page = usage(context, server, keys["ann"])
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert axe(page) == []
    page.set_viewport_size({"width": 360, "height": 700})
    page.wait_for_function("document.documentElement.scrollWidth <= 360")  # the plots follow the width
    eve = usage(context, server, keys["eve"])
    expect(eve.get_by_text("Nothing was used in this period.")).to_be_visible()


def test_scales_are_round(context: BrowserContext, server: ConsoleServer):
    """From 0 to the greatest value, in few steps, for any value."""
    page = context.new_page()
    open_signed_in(page, server.url, server.key)
    ticks = "(module, all) => all.map(([high, least]) => module.ticksTo(high, least))"
    cases: list[list[float]] = [[0, 1], [1, 1], [7, 0.001], [99_999, 1], [100_000, 1], [2**53, 1], [3, 1]]
    for (high, least), marks in zip(cases, module_of(page, "js/lists/plot.js", ticks, cases), strict=True):
        assert marks[0] == 0
        assert marks[-1] >= max(high, least) * 0.999
        assert 2 <= len(marks) <= 7
