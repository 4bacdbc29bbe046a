"""`bench harm`: how many labelled harmful prompts and replies get through the server to a client.

Two servers run one after the other, with all settings at their defaults. The first serves the built-in model
and gets harmful and ordinary prompts. The second says labelled replies, whatever the prompt: harmful replies
after harmful prompts, harmful replies after ordinary prompts (as after an attack that no screen sees), benign
replies after ordinary prompts. What counts is what a client got: nothing, a part, or the whole. The figures
flatter, because the classifiers were trained on these files. A model that answers every harmful prompt with
a harmful reply is worse than real ones. Shares have 95% intervals (Wilson).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.safety.evaluation import prompts as evaluation
from app.safety.evaluation.prompts import Row
from scripts.benchmarks import replaying
from scripts.benchmarks.driver import served_model
from scripts.benchmarks.harm_ask import BLOCKED, NOTHING, PART, TOO_LONG, WHOLE, Fate, ask
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import ServerProcess, free_port

HARMFUL, ORDINARY = "harmful prompt", "ordinary prompt"
AFTER_HARMFUL, AFTER_ORDINARY = "harmful reply, harmful prompt", "harmful reply, ordinary prompt"
BENIGN = "benign reply, ordinary prompt"
MODEL_TOKENS = 64
SEED = 1


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and the reply that is said to it, unless the model says one itself."""

    arm: str
    prompt: Row
    reply: Row | None = None

    @property
    def source(self) -> str:
        """Where what is looked at comes from."""
        return (self.reply or self.prompt).source


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case."""

    case: Case
    fate: Fate

    def record(self) -> dict[str, Any]:
        """As it goes into the result file: without texts."""
        fields = asdict(self.fate)
        del fields["text"]
        return {"arm": self.case.arm, "source": self.case.source, **fields}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench harm`."""
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of the public files")
    parser.add_argument(
        "--prompts", type=int, default=3000, help="prompts, and as many replies (default: 3000)"
    )
    parser.add_argument("--at-once", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, shares and every outcome")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="write the model's answers to harmful prompts"
    )
    parser.add_argument("--no-model", action="store_true", help="leave out the built-in model")


def run(arguments: argparse.Namespace) -> int:
    """Ask, count, print; write what was asked for."""
    machine, rng = describe_machine(), random.Random(SEED)  # noqa: S311  # reproducible, not secret
    harmful, ordinary = _prompts(arguments.data, rng)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.no_model:
            half = arguments.prompts // 2
            cases = [Case(HARMFUL, row) for row in _evenly(harmful, half)]
            cases += [Case(ORDINARY, row) for row in _evenly(ordinary, half)]
            outcomes += _model(cases, arguments, Path(folder), rng)
        cases = _replies(arguments.data, harmful, ordinary, arguments.prompts, rng)
        outcomes += _replayed(cases, arguments, Path(folder), rng)
    print(_table(outcomes, lambda outcome: outcome.case.arm))
    answered = [
        each for each in outcomes if each.case.reply and each.case.reply.harmful and each.fate.name != BLOCKED
    ]
    print("\nharmful replies to prompts that were not refused:\n")
    print(_table(answered, lambda outcome: "watched" if outcome.fate.watched else "not watched"))
    for arm in dict.fromkeys(outcome.case.arm for outcome in outcomes):
        print(f"\n{arm}, by source:\n")
        print(_table([each for each in outcomes if each.case.arm == arm], lambda each: each.case.source))
    if arguments.json:
        _write_json(arguments.json, machine, outcomes)
    if arguments.keep:
        _keep(arguments.keep, outcomes)
    return 0


def _prompts(data: Path, rng: random.Random) -> tuple[list[Row], list[Row]]:
    """Harmful prompts, and those of the files of ordinary ones, shuffled."""
    files = sorted(path for path in data.glob("*.jsonl.gz") if not path.name.startswith("out_"))
    ordinary = evaluation.read([path for path in files if path.name.startswith("benign_")]).rows
    others = evaluation.read([path for path in files if not path.name.startswith("benign_")]).rows
    harmful = [row for row in others if row.harmful]
    rng.shuffle(harmful)
    rng.shuffle(ordinary)
    return harmful, ordinary


def _evenly(rows: Sequence[Row], number: int) -> list[Row]:
    """So many rows, of each source alike as long as it has some; in an order that mixes them."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    ranked = [(rank, row) for some in by_source.values() for rank, row in enumerate(some)]
    ranked.sort(key=lambda each: each[0])
    return [row for _, row in ranked[:number]]


def _replies(
    data: Path, harmful: Sequence[Row], ordinary: Sequence[Row], number: int, rng: random.Random
) -> list[Case]:
    """Half of them harmful replies, half of these after harmful prompts; all drawn as they are frequent."""
    replies = evaluation.read(sorted(data.glob("out_*.jsonl.gz")), "output").rows
    replies = [row for row in replies if row.text.strip()]
    bad = [row for row in replies if row.harmful]
    good = [row for row in replies if not row.harmful]
    third = number // 3
    plan = ((AFTER_HARMFUL, harmful, bad), (AFTER_ORDINARY, ordinary, bad), (BENIGN, ordinary, good))
    return [
        Case(arm, prompt, reply)
        for arm, prompts, pool in plan
        for prompt, reply in zip(_evenly(prompts, third), rng.sample(pool, third), strict=True)
    ]


def _model(
    cases: Sequence[Case], arguments: argparse.Namespace, folder: Path, rng: random.Random
) -> list[Outcome]:
    port = free_port()
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--data-dir", str(folder / "model")]
    server = ServerProcess("model", command, port, folder / "model.log")
    return _asked(server, cases, arguments.at_once, rng, {"max_tokens": MODEL_TOKENS, "temperature": 0})


def _replayed(
    cases: Sequence[Case], arguments: argparse.Namespace, folder: Path, rng: random.Random
) -> list[Outcome]:
    port, replies = free_port(), folder / "replies.jsonl"
    replies.write_text("".join(json.dumps(case.reply.text) + "\n" for case in cases if case.reply))
    command = [sys.executable, "-m", replaying.__name__, "serve", "--engine", "scripted"]
    command += ["--port", str(port), "--data-dir", str(folder / "replies")]
    server = ServerProcess("replies", command, port, folder / "replies.log", ready_path="/readyz")
    return _asked(server, cases, arguments.at_once, rng, {}, {replaying.REPLIES: str(replies)})


def _asked(
    server: ServerProcess,
    cases: Sequence[Case],
    at_once: int,
    rng: random.Random,
    options: dict[str, Any],
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Start a server, ask it everything in some order, stop it."""
    order = list(enumerate(cases))
    rng.shuffle(order)
    server.start(environment)
    try:
        server.wait_ready()
        model = served_model(server.port)

        def measure(place: tuple[int, Case]) -> Outcome:
            number, case = place
            steering = {} if case.reply is None else {"seed": number}
            fate = ask(server.port, {"model": model, **steering, **options}, case.prompt.text)
            if case.reply is not None:
                fate = fate.against(case.reply.text)
            return Outcome(case, fate)

        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(measure, order))
    finally:
        server.stop()


def _table(outcomes: Sequence[Outcome], name_of: Callable[[Outcome], str]) -> str:
    """A row for each name: the shares of what came out, and what had leaked of answers that were halted."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[name_of(outcome)].append(outcome)
    head = [
        "",
        "n",
        "refused at the prompt",
        "halted, nothing out",
        "halted, a part out",
        "whole",
        "leak p50, p90",
    ]
    rows = [head, ["---"] * len(head), *([name, *_cells(some)] for name, some in sorted(groups.items()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    fates = Counter(outcome.fate.name for outcome in outcomes)
    number = len(outcomes) - fates[TOO_LONG]
    shares = [_share(fates[name], number) for name in (BLOCKED, NOTHING, PART, WHOLE)]
    leaked = [outcome.fate.tokens for outcome in outcomes if outcome.fate.name in (NOTHING, PART)]
    quantiles = evaluation.quantiles([float(tokens) for tokens in leaked])
    leak = f"{quantiles['p50']:.0f}, {quantiles['p90']:.0f}" if leaked else ""
    return [str(number), *shares, leak]


def _share(count: int, whole: int) -> str:
    share = evaluation.rate(count, whole)
    if share is None:
        return ""
    return f"{count}: {share['rate']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"


def _write_json(path: Path, machine: dict[str, object], outcomes: Sequence[Outcome]) -> None:
    by_arm: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        by_arm[outcome.case.arm][outcome.fate.name] += 1
    content = {
        "benchmark": "harm",
        "machine": machine,
        "arms": by_arm,
        "outcomes": [outcome.record() for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _keep(path: Path, outcomes: Sequence[Outcome]) -> None:
    kept = [
        {
            "prompt": each.case.prompt.text,
            "source": each.case.source,
            "said": each.fate.text,
            "fate": each.fate.name,
        }
        for each in outcomes
        if each.case.arm == HARMFUL and each.fate.text
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), "utf-8")
