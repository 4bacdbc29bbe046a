"""Runs one server for a long time under load, and does to it whatever may happen to a server.

Its engine is killed and stopped, it is stopped and killed itself, its clients drop, return, leave and cancel,
and more of them arrive than it takes. Exits with 1 when anything did not hold. docs/inside/fault-tests.md
says what is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.crash.books import Books
from scripts.crash.findings import Findings
from scripts.crash.http import Connection
from scripts.crash.server import ServerFailed
from scripts.crash.soak_cases import Case, Profile, profile
from scripts.crash.soak_checks import StoryChecks
from scripts.crash.soak_clients import Manner, SoakClient, Story
from scripts.crash.soak_faults import HANG_S, Disturber, planned
from scripts.crash.soak_lives import Lives
from scripts.crash.soak_metrics import (
    MetricChecks,
    Sample,
    last_two_thirds,
    metrics,
    sample,
    slope_per_hour,
    wait_idle,
)
from scripts.crash.soak_traffic import SoakTraffic

LEARNERS = 8
"""Undisturbed answers at once."""
END_S = 600.0
"""Seconds within which every client has its end, once nothing new is asked: a restart or two."""
IDLE_S = 150.0
"""The same for what clients have left: `suspend_timeout_s`, grace and retention."""
TPM = 10_000_000
"""Tokens a minute of the keys: never reached, but reserved."""
SETTINGS = {
    "engine-restarts": "1000",
    "engine-restart-window-s": "30",
    "engine-hang-s": f"{HANG_S}",
    "heartbeat-s": "1",
    "drain-timeout-s": "1",
    "degrade-rise-s": "0.5",
}


class Soak:
    """One data directory, its servers and clients, and what was found."""

    def __init__(self, directory: Path, seed: int, engine: Profile, minutes: float) -> None:
        self._rng = random.Random(seed)  # noqa: S311  # moments that can be had again, not a secret
        self._engine = engine
        self._minutes = minutes
        self.findings = Findings(step="round")
        config = directory / "tokenring.toml"
        config.write_text(engine.config)
        times = {"suspend-timeout-s": engine.suspend_s, "resume-grace-s": engine.grace_s}
        settings = {**SETTINGS, **times, "retention-s": engine.retention_s}
        flags = [flag for name, value in settings.items() for flag in (f"--{name}", str(value))]
        arguments = ["--config", str(config), *flags, *engine.arguments]
        self._lives = Lives(directory / "data", arguments, self.findings)
        self._checks = StoryChecks(self._lives, self.findings)
        self._metrics = MetricChecks(self._lives, self._checks, self.findings)
        self._books = Books(self._lives.path, self.findings)
        self._keys: dict[str, dict[str, str]] = {}
        self._samples: list[Sample] = []
        self._disturber: Disturber | None = None
        self._num_rounds = 0
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Run it all; a server that does not start ends it."""
        watching = asyncio.create_task(self._lives.watch())
        try:
            await self._lives.start()
            await self._make_keys()
            await self._learn()
            await self._rounds()
            if self._minutes >= 1:
                await self._check_nothing_reserved()
            await self._end()
        except ServerFailed as error:
            self.findings.check(holds=False, what="the server starts", error=str(error))
        finally:
            watching.cancel()
            await self._lives.kill()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _make_keys(self) -> None:
        """An admin's key, and two that reserve tokens and spend a budget; one may have four generations."""
        limits = {"tpm": TPM, "budget_usd": 1000}
        terms: dict[str, dict[str, Any]] = {
            "admin": {"scope": "admin"},
            "wide": limits,
            "narrow": {**limits, "max_streams": 4},
        }
        for name, fields in terms.items():
            async with await Connection.to(self._lives.port) as connection:
                body = {"name": name, **fields}
                answer = await connection.ask("POST", "/api/admin/keys", body, self._keys.get("admin"))
                secret = (await answer.json())["key"]
            self._keys[name] = {"authorization": f"Bearer {secret}"}

    # The undisturbed answers

    async def _learn(self) -> None:
        """Receive every answer twice, undisturbed; both must be the same."""
        first = await self._undisturbed()
        second = await self._undisturbed()
        for case, reply in first.items():
            self.findings.check(
                (reply.reply.text, reply.reply.finish) == (second[case].reply.text, second[case].reply.finish)
                if reply.attempts
                else case.blocked,
                "an undisturbed answer is the same each time",
                case=case.name,
                faults=reply.faults,
            )
            if reply.attempts:
                case.expected = second[case].reply
        await self._collect([*first.values(), *second.values()])
        self._say(f"{len(first)} undisturbed answers")

    async def _undisturbed(self) -> dict[Case, Story]:
        stories: dict[Case, Story] = {}
        seats = asyncio.Semaphore(LEARNERS)

        async def receive(case: Case) -> None:
            async with seats:
                stored = case.then is not None
                manner = Manner("/api" if stored else "/v1", stored=stored, streamed=True)
                story = stories[case] = await self._ask(case, manner)
                if case.then is not None:
                    stories[case.then] = await self._ask(case.then, manner, story.conversation_id)

        await asyncio.gather(*map(receive, self._engine.cases))
        return stories

    async def _ask(self, case: Case, manner: Manner, conversation_id: str | None = None) -> Story:
        story = Story(case, manner, key=None)
        headers = self._keys["wide"]
        return await SoakClient(self._lives, story, headers, conversation_id=conversation_id).run()

    # Rounds

    async def _rounds(self) -> None:
        """Rounds until the time is over; the server itself is stopped and killed in the first third alone."""
        traffic = SoakTraffic(self._engine.cases, self._lives, self._rng, self._keys)
        self._disturber = Disturber(self._lives, traffic, self._rng)
        began_s, until_s = time.monotonic(), self._began_s + self._minutes * 60
        restarts_until_s = began_s + (until_s - began_s) / 3
        while (now_s := time.monotonic()) < until_s or not self._num_rounds:
            may_restart = now_s < restarts_until_s or not self._num_rounds
            self._num_rounds += 1
            self.findings.kill = self._num_rounds
            faults = planned(self._rng, may_restart=may_restart, has_processes=self._engine.has_processes)
            traffic.begin()
            await self._disturber.disturb(faults)
            await asyncio.sleep(self._rng.uniform(2, 10))
            late = await traffic.end(END_S)
            names = [(s.case.name, s.manner, dict(s.refusals), len(s.attempts)) for s in late]
            self.findings.check(not late, "every client has its end", late=names)
            await self._collect(traffic.take())

    async def _collect(self, stories: list[Story]) -> None:
        """Wait until nothing is kept any more, then check the books, the metrics and the memory."""
        port, admin = self._lives.port, self._keys["admin"]
        busy = await wait_idle(port, admin, IDLE_S)
        self.findings.check(not busy, "nothing stays reserved, live or kept", busy=busy)
        self._checks.check(stories, self._books.read())
        self._metrics.check(await metrics(port, admin))
        self._lives.check_log(self._lives.now)
        self._samples.append(sample(self._lives.now, len(self._lives.all)))
        held = " ".join(f"{name} {value}" for name, value in self._samples[-1].held.items())
        self._say(
            f"round {self._num_rounds}: {len(stories)} requests, {self.findings.num_checks} checks, "
            f"{len(self.findings.violations)} violations; {held}"
        )

    def _say(self, line: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.0f} s  {line}", file=sys.stderr, flush=True)

    # The end

    async def _end(self) -> None:
        """Nothing is held, nothing is reserved, and the files are whole."""
        mine = [s for s in self._samples if s.life == len(self._lives.all)]
        for what in ("descriptors", "threads", "children"):
            grown = mine[-1].held[what] - mine[0].held[what]
            self.findings.check(
                abs(grown) <= 5, f"{what} stay within 5", first=mine[0].held, last=mine[-1].held
            )
        self.findings.check(not mine[-1].held["zombies"], "no zombies are left", last=mine[-1].held)
        await self._lives.stop()
        self._books.check_file()

    async def _check_nothing_reserved(self) -> None:
        """A minute after the last request, the keys have all of their tokens again."""
        until_s = time.monotonic() + 130  # two minutes' windows and a little
        for name in ("wide", "narrow"):
            left = 0
            while left < TPM and time.monotonic() < until_s:
                async with await Connection.to(self._lives.port) as connection:
                    answer = await connection.ask("GET", "/v1/models", None, self._keys[name])
                    await answer.json()
                left = int(answer.headers["x-ratelimit-remaining-tokens"])
                await asyncio.sleep(1)
            self.findings.check(left == TPM, "what keys have reserved returns", key=name, left=left)

    def result(self) -> dict[str, Any]:
        """The figures."""
        checks, mine = self._checks, [s for s in self._samples if s.life == self._samples[-1].life]
        late = last_two_thirds(mine)
        requests, tokens, micro_usd = self._books.totals
        return {
            "engine": self._engine.name,
            "minutes": round((time.monotonic() - self._began_s) / 60, 1),
            "rounds": self._num_rounds,
            "done": dict(self._disturber.done) if self._disturber else {},
            "lives": len(self._lives.all),
            "requests": checks.num_requests,
            "ledger": {"rows": requests, "completion_tokens": tokens, "cost_micro_usd": micro_usd},
            "ends": dict(checks.ends),
            "refusals": dict(checks.refusals),
            "unread_answers_stopped": checks.num_unread,
            "choices_lost": checks.choices_lost,
            "longest_silence_s": round(checks.longest_wait_s, 2),
            "checks": self.findings.num_checks,
            "violations": len(self.findings.violations),
            "last_life": {
                "losses_of_the_engine": len(self._lives.now.losses),
                "held_first": dict(mine[0].held) if mine else {},
                "held_last": dict(mine[-1].held) if mine else {},
                "rss_mb_at_s": [(round(s.at_s - self._began_s), s.held["rss_mb"]) for s in mine],
                "rss_mb_per_hour": round(slope_per_hour(late, "rss_mb"), 1),
            },
        }


def main() -> int:
    """Run the soak; the exit status."""
    arguments = _arguments()
    directory = Path(tempfile.mkdtemp(prefix="tokenring-soak-"))
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, data in {directory}", file=sys.stderr, flush=True)
    soak = Soak(directory, seed, profile(arguments.engine), arguments.minutes)
    asyncio.run(soak.run())
    result = {"seed": seed, **soak.result()}
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name.replace('_', ' '):24} {value}")
    if soak.findings.violations:
        print(f"{result['violations']} VIOLATIONS; the data is kept in {directory}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="until the last round begins (default 30)"
    )
    parser.add_argument("--engine", choices=("sglang", "scripted"), default="sglang", help="what generates")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; the timing is never the same")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
