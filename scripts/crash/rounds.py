"""Rounds of the test: start, check what the last death left, ask, kill.

    start ─▶ ready ─▶ read the books ─▶ clients ask, those of before come back ─▶ SIGKILL ─▶ start …

A death comes after some seconds of traffic, within a few milliseconds of the first requests, or
while the server drains; some starts are killed too. Nothing is checked twice, and what a death
cuts off is checked in the next life.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from app.store.database import FILE_NAME
from scripts.crash.books import PRICES, Books, Row
from scripts.crash.findings import Findings
from scripts.crash.http import Gone, get_json
from scripts.crash.reconnect import Bounds, Reconnect
from scripts.crash.sent_request import SentRequest
from scripts.crash.server import Server, ServerFailed
from scripts.crash.traffic import Engine, Traffic

DRAIN_S = 0.6
DEATHS = (*["running"] * 6, "early", "draining")
"""In any order, and then again: a short test has its share of each."""
START_KILLS = 0.1
"""Share of starts that are killed before the one that counts."""
START_S = 0.8
EARLY_S = 0.1
SETTLE_S = 10.0
"""How long clients may take to notice that their server is gone."""

SCRIPTED = Engine(
    name="scripted",
    arguments=("--engine", "scripted", "--scripted", "rate=50,tokens=240"),
    model="scripted",
    rate=50.0,
    tokens=240,
    lengths=(1, 300),
    longest_s=3.0,
)
SGLANG = Engine(
    name="sglang",
    arguments=("--engine", "sglang"),
    model="tokenring-builtin",
    rate=200.0,
    tokens=0,
    lengths=(20, 400),
    longest_s=6.0,
)


class Death(NamedTuple):
    """When a life ends, from its first request on, and whether it drains then."""

    how: str
    after_s: float
    drained_s: float = 0.0


class Rounds:
    """One data directory and all lives of the server on it."""

    def __init__(
        self, engine: Engine, directory: Path, streams: int, seed: int, *, margin_s: float, longest_s: float
    ) -> None:
        self.findings = Findings()
        self.start_kills = 0
        self.killed_in_flight = 0
        self._rng = random.Random(seed)  # noqa: S311  # a mix that can be had again, not a secret
        self._engine = engine
        self._streams = streams
        self._longest_s = longest_s
        self._data_dir = directory / "data"
        self._config = directory / "tokenring.toml"
        table = "".join(f'{name} = "{price}"\n' for name, price in PRICES.items())
        self._config.write_text(f'[[prices]]\nmodel = "*"\n{table}')
        self._next_deaths: list[str] = []
        self._bounds = Bounds(engine.rate, margin_s)
        self._traffic = Traffic(engine, self._rng, self.findings)
        self._books = Books(self._data_dir / FILE_NAME, self.findings)
        self._to_check: deque[tuple[SentRequest, Row | None]] = deque()

    async def run(self, kills: int) -> None:
        """All rounds, and at last a stop that nobody kills; a server that cannot start ends them."""
        try:
            await self._all(kills)
        except ServerFailed as error:
            what = "the server starts again on what it has left"
            self.findings.check(holds=False, what=what, error=str(error))

    async def _all(self, kills: int) -> None:
        for kill in range(1, kills + 1):
            self.findings.kill = kill
            await self._round(kill, kills, self._death())
        self.findings.kill = kills + 1
        await self._stop_round()
        await self._last_look()

    def _death(self) -> Death:
        if not self._next_deaths:
            self._next_deaths = self._rng.sample(DEATHS, len(DEATHS))
        how = self._next_deaths.pop()
        if how == "early":
            return Death(how, self._rng.uniform(0, EARLY_S))
        after_s = self._rng.uniform(0.1, self._longest_s)
        if how == "draining":
            return Death(how, min(after_s, 1.0), self._rng.uniform(0, DRAIN_S + 0.2))
        return Death(how, after_s)

    async def _round(self, kill: int, kills: int, death: Death) -> None:
        began_s = time.monotonic()
        server = await self._start()
        ready_s = time.monotonic() - began_s
        asking = asyncio.create_task(self._traffic.run(server, self._streams))
        checking = asyncio.create_task(self._check_left(server))
        await asyncio.sleep(death.after_s)
        if death.how == "draining":
            server.terminate()
            await asyncio.sleep(death.drained_s)
        await server.kill()
        await self._over(asking, checking)
        live = sum(1 for a in self._traffic.sent if a.status in (None, 200) and not a.reply.done)
        self.killed_in_flight += live
        print(
            f"kill {kill:3}/{kills}  {death.how:8} after {death.after_s + death.drained_s:4.2f} s"
            f"  start {ready_s:4.2f} s  sent {len(self._traffic.sent):3}  in flight {live:3}"
            f"  reconciled {server.reconciled:3}  left to check {len(self._to_check):3}"
            f"  checks {self.findings.num_checks:6}  violations {len(self.findings.violations)}",
            flush=True,
        )

    async def _start(self) -> Server:
        """A server that is ready, after some that were killed before they were."""
        arguments = [
            "--config",
            str(self._config),
            "--suspend-timeout-s",
            "0",  # so that each life ends what it began: tests/fault/test_restart.py has the others
            "--drain-timeout-s",
            str(DRAIN_S),
            *self._engine.arguments,
        ]
        while self._rng.random() < START_KILLS:
            early = await Server.start(self._data_dir, arguments)
            await asyncio.sleep(self._rng.uniform(0, START_S))
            await early.kill()
            self.start_kills += 1
            self._check_log(early)
        server = await Server.start(self._data_dir, arguments)
        try:
            await server.ready()
        except BaseException:
            await server.kill()
            raise
        self._take_stock()
        await self._check_usage(server)
        return server

    async def _check_usage(self, server: Server) -> None:
        """The API says what the rows say."""
        today = datetime.now(UTC).date()
        days = f"from={today - timedelta(days=1)}&to={today + timedelta(days=1)}"
        _, usage = await get_json(server.port, f"/api/usage?{days}")
        reported = tuple(usage[name] for name in ("requests", "output_tokens", "cost_micro_usd"))
        self.findings.check(
            reported == self._books.totals, "the usage told is that of the rows", reported=reported
        )

    async def _over(self, *tasks: asyncio.Task[None]) -> None:
        """Wait for what dies with the server; what broke is raised."""
        _, late = await asyncio.wait(tasks, timeout=SETTLE_S)
        self.findings.check(not late, "clients notice that their server is gone")
        for task in late:
            task.cancel()
        for task in set(tasks) - late:
            task.result()

    def _check_log(self, server: Server) -> None:
        # SGLang has progress bars and warnings of its own.
        noise = [line for line in server.noise if self._engine.scripted or "Traceback" in line]
        broken = server.faults + noise
        self.findings.check(not broken, "nothing breaks in the server", log=broken, noise=server.noise)

    # What a death has left

    def _take_stock(self) -> None:
        """Read the books, and find the row of each request since the last time."""
        rows = self._books.read()
        sent = self._traffic.take()
        for server in {request.life for request in sent}:
            self._check_log(server)
        by_id = {request.request_id: request for request in sent if request.request_id is not None}
        headless = [request for request in sent if request.request_id is None]
        for row in rows.values():
            if row.id not in by_id:
                self._match_headless(row, headless)
        for request in sent:
            if request.request_id is not None:
                self._to_check.append((request, rows.get(request.request_id)))
            elif request.repeats is not None and request.refused is None:
                self._traffic.to_ask_anew.append(request.repeats)

    def _match_headless(self, row: Row, headless: list[SentRequest]) -> None:
        """Give a row to the request whose client never learned its id."""
        for sent in headless:
            if row.question is not None:
                mine = sent.stored and row.question.split(" ")[0] == sent.tag
            else:
                mine = not sent.stored and sent.body["max_tokens"] * sent.n == row.max_tokens
                mine &= not sent.scripted or sent.prompt_words + 1 == row.bill.prompt_tokens
            if mine:
                headless.remove(sent)
                sent.request_id, sent.conversation_id = row.id, row.conversation_id
                sent.left = True
                return
        self.findings.check(holds=False, what="each row is of a request that was sent", row=row)

    async def _check_left(self, server: Server) -> None:
        """Let the clients of before come back, until all have or the server is gone."""
        while self._to_check:
            sent, row = self._to_check[0]
            try:
                await Reconnect(sent, row, self._bounds, self.findings).run(server.port, self._rng)
            except Gone:
                return
            self._to_check.popleft()
            self._go_on(sent, row)

    def _go_on(self, sent: SentRequest, row: Row | None) -> None:
        """What is to be sent after a checked request: its key once more, its conversation's next turn."""
        completed = row is not None and row.bill.outcome in ("stop", "length", "abort")
        if sent.key is not None and not sent.refused:
            if completed and sent.reply.done and sent.repeats is None:
                self._traffic.to_repeat.append(sent)
            elif not completed and sent.continues is None:
                self._traffic.to_ask_anew.append(sent)
        if row is None or row.conversation_id is None:
            if sent.continues is not None and row is None:
                self._traffic.at_rest(sent.continues, first=True)
        elif not completed:
            self._traffic.at_rest(row.conversation_id, first=True)
        elif not sent.reply.done:
            self._traffic.at_rest(row.conversation_id)

    # A stop that nobody kills

    async def _stop_round(self) -> None:
        """SIGTERM under load: every client is told an end, and the exit is clean."""
        server = await self._start()
        asking = asyncio.create_task(self._traffic.run(server, self._streams))
        await self._check_left(server)
        await asyncio.sleep(1.0)
        server.terminate()
        status = await server.stopped()
        self.findings.check(status == 0, "a stop by SIGTERM exits with 0", status=status)
        await self._over(asking)
        for sent in self._traffic.sent:
            if sent.status == 200 and not sent.left:
                has_end = sent.reply.done and (sent.reply.error or sent.reply.finish_reasons)
                self.findings.check(has_end, "a stop tells each client an end", id=sent.request_id)

    async def _last_look(self) -> None:
        """Once more from the start: nothing was interrupted by the stop; then the file itself."""
        server = await self._start()
        self.findings.check(server.reconciled == 0, "a stop leaves nothing open", open=server.reconciled)
        await self._check_left(server)
        self.findings.check(not self._to_check, "every request was checked", left=len(self._to_check))
        server.terminate()
        await server.stopped()
        self._check_log(server)
        self._books.check_file()


def report(rounds: Rounds, settings: Mapping[str, object], took_s: float) -> dict[str, object]:
    """The result as JSON has it."""
    findings = rounds.findings
    return {
        **settings,
        "took_s": round(took_s, 1),
        "start_kills": rounds.start_kills,
        "killed_in_flight": rounds.killed_in_flight,
        "ends": dict(sorted(findings.ends.items())),
        "worst_shortfall_tokens": findings.shortfall.tokens,
        "worst_shortfall_s": round(findings.shortfall.seconds, 3),
        "most_billed_beyond_received_tokens": findings.ahead_tokens,
        "num_checks": findings.num_checks,
        "checks": dict(sorted(findings.checks.items())),
        "violations": findings.violations,
    }
