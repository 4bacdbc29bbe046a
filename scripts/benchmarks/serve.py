"""`bench serve`: Tokenring against SGLang's own server, in interleaved pairs within one run.

Both servers are up at once and take turns, so that the two runs of a pair are seconds apart on the same
machine. The idle one is frozen (SIGSTOP), because an idle SGLang scheduler polls without rest and would take
a core from the other. Both are started anew several times. After each start one pair is not measured. The
order alternates: ours, the peer, the peer, ours. More servers may take turns with these two.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.benchmarks import bare, engine_args, findings, forest_plot, litellm, report
from scripts.benchmarks.driver import RunResult, freeze_gc, run_load, served_model
from scripts.benchmarks.findings import Finding
from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import ServerProcess, free_port
from scripts.benchmarks.prompts import chat_work

OURS, PEER, LITELLM, SCREENS_OFF = "ours", "bare", "litellm", "screens off"
WARM_UP = -1
STARTS = 9
V1 = "/v1/chat/completions"
FIGURES = {
    PEER: report.SERVE_FIGURES,
    LITELLM: (
        replace(report.CPU_FIGURE, bound=round(1 / 3, 3)),
        report.Figure("output tokens/s", "tokens_per_s", "higher"),
        report.Figure("TTFT p50, ms", "ttft_p50_ms", "lower"),
        report.Figure("TTFT p99, ms", "ttft_p99_ms", "lower"),
        report.Figure("ITL p99, ms", "itl_p99_ms", "lower"),
        report.Figure("frames per token", "frames_per_token", "higher"),
    ),
    SCREENS_OFF: tuple(replace(figure, bound=None) for figure in report.SERVE_FIGURES),
}
"""By the server that ours is compared with; a gateway must use three times the CPU of ours."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison: a running server and where it takes chats."""

    server: ServerProcess
    path: str
    model: str
    headers: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of every side with the same prompts, by its name, in one start of the servers."""

    start: int
    runs: Mapping[str, RunResult]


@dataclass(slots=True)
class Measured:
    """All turns by the number of streams, and the commands of the servers of the last start."""

    turns: dict[int, list[Turn]]
    commands: dict[str, list[str]] = field(default_factory=dict)

    def compared(self) -> dict[str, list[report.Comparison]]:
        """Ours against each other server, at every load that was measured."""
        peers = [name for name in self.commands if name != OURS]
        return {peer: [item for turns in self._loads() for item in _compare(turns, peer)] for peer in peers}

    def rows(self) -> list[Finding]:
        """The rows of section 9 of the design."""
        return [row for peer, items in self.compared().items() for row in report.rows(items, peer)]

    def runs(self) -> list[RunResult]:
        """Every run."""
        return [run for turns in self._loads() for turn in turns for run in turn.runs.values()]

    def notes(self) -> list[str]:
        """A line for each load: how much was measured, and how busy the machine was with other things."""
        return [_note(turns) for turns in self._loads()]

    def _loads(self) -> list[list[Turn]]:
        return [turns for turns in self.turns.values() if turns]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench serve`."""
    parser.add_argument(
        "--streams", default="16,64", help="concurrent streams, comma-separated (default: 16,64)"
    )
    parser.add_argument("--pairs", type=int, default=18, help="measured pairs per load (default: 18)")
    parser.add_argument(
        "--starts",
        type=int,
        default=STARTS,
        help=f"how often all servers are started anew, the pairs spread over that (default: {STARTS})",
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="mean output tokens per request (default: 128)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="requests per stream and run (default: 3)")
    parser.add_argument("--prompt-words", type=int, default=40, help="words per prompt (default: 40)")
    parser.add_argument("--model", default="", help="path or hub id (default: the built-in model)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    engine_args.add_argument(parser)
    parser.add_argument(
        "--with-litellm", action="store_true", help="a third server: LiteLLM's proxy in front of the peer"
    )
    parser.add_argument(
        "--with-screens-off", action="store_true", help="another server: ours without the safety screens"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine and every run")
    forest_plot.add_flag(parser)
    parser.add_argument(
        "--ours-path",
        default="/api/chat/completions",
        help="where ours takes chats: /api stores each as a conversation (the default), /v1 none",
    )
    parser.add_argument("--ours-command", help="start ours with this command, {port} replaced")
    parser.add_argument("--peer-command", help="start the peer with this command, {port} replaced")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, write what was asked for."""
    measured, machine = empty(arguments), describe_machine()
    try:
        measure(arguments, measured)
    finally:  # cut short, a run still tells what it has
        _tell(arguments, machine, measured)
    return 0


def empty(arguments: argparse.Namespace) -> Measured:
    """The loads that are asked for, nothing measured yet."""
    return Measured({int(streams): [] for streams in arguments.streams.split(",")})


def measure(arguments: argparse.Namespace, measured: Measured) -> None:
    """Fill in the turns. Ends the command where LiteLLM is asked for and cannot be installed."""
    if arguments.with_litellm:
        litellm.install()
    for start, numbers in enumerate(spread(arguments.pairs, arguments.starts)):
        with tempfile.TemporaryDirectory() as folder, _sides(arguments, Path(folder), start) as sides:
            measured.commands = {side.server.name: side.server.command for side in sides}
            for streams, turns in measured.turns.items():
                for number in (WARM_UP, *numbers):
                    order = sides if number % 2 == 0 else sides[::-1]
                    runs = {side.server.name: _turn(side, streams, number, arguments) for side in order}
                    if number != WARM_UP:
                        turns.append(
                            Turn(start, {side.server.name: runs[side.server.name] for side in sides})
                        )
                        print(_progress(number, turns[-1]), file=sys.stderr)


def spread(pairs: int, starts: int) -> list[range]:
    """The numbers of the pairs of each start. Ends the command where there would be none.

    Another start of the same program is some percent faster or slower for as long as it lives. The pairs of
    one start share that, so that only whole starts may be drawn for an interval (`stats.paired_ratio`).
    """
    if pairs < 1 or starts < 1:
        raise SystemExit(f"{pairs} pairs over {starts} starts measure nothing; have at least one of each.")
    starts = min(starts, pairs)
    return [range(start * pairs // starts, (start + 1) * pairs // starts) for start in range(starts)]


def _compare(turns: Sequence[Turn], peer: str) -> list[report.Comparison]:
    ours, theirs = ([turn.runs[name] for turn in turns] for name in (OURS, peer))
    return report.compare(FIGURES[peer], ours, theirs, [turn.start for turn in turns])


def _tell(arguments: argparse.Namespace, machine: dict[str, object], measured: Measured) -> None:
    compared, runs = measured.compared(), measured.runs()
    for peer, comparisons in compared.items():
        print(f"{report.markdown_table(comparisons, peer)}\n")
    if runs:
        print(f"{findings.markdown(measured.rows())}\n\n{report.cpu_bars(runs)}\n")
    print("\n".join(measured.notes()))
    if arguments.json:
        _write_json(arguments, machine, measured)
    if arguments.plot:
        title = f"Tokenring against SGLang's bare server, {machine['commit']}, {machine['date_utc']}"
        forest_plot.write_svg(arguments.plot, compared.get(PEER, []), title)


def _turn(side: Side, streams: int, number: int, arguments: argparse.Namespace) -> RunResult:
    work = chat_work(
        side.model,
        streams * arguments.rounds,
        mean_tokens=arguments.tokens,
        prompt_words=arguments.prompt_words,
        seed=1_000_000 * streams + number + 1,
    )
    plan = LoadPlan(
        "127.0.0.1",
        side.server.port,
        side.path,
        work.bodies,
        work.output_tokens,
        streams,
        headers=side.headers,
    )
    side.server.thaw()
    try:
        run_load(side.server, _wake_up(plan))
        return run_load(side.server, plan)
    finally:
        side.server.freeze()


def _wake_up(plan: LoadPlan) -> LoadPlan:
    """One unmeasured request after the thaw, in which timers that fell due in the freeze fire."""
    body = plan.bodies[0].replace('"content": "', '"content": "wake up ', 1)
    return replace(plan, bodies=[body], output_tokens=plan.output_tokens[:1], streams=1)


@contextlib.contextmanager
def _sides(arguments: argparse.Namespace, folder: Path, start: int) -> Iterator[list[Side]]:
    """Every side, up and frozen; ours is started first, in every other start the peer."""
    names = [OURS, PEER][:: -1 if start % 2 else 1]
    names += [SCREENS_OFF] * arguments.with_screens_off
    sides: dict[str, Side] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            server = _server(name, arguments, folder)
            _start(server, stack)
            if server.ready_path == "/health":
                freeze_gc(server.port)
            path = V1 if name == PEER else arguments.ours_path
            sides[name] = Side(server, path, served_model(server.port))
            server.freeze()
        if arguments.with_litellm:
            peer = sides[PEER]
            proxy = litellm.ProxiedServer(LITELLM, peer.server, free_port(), folder, peer.model)
            _start(proxy, stack)
            sides[LITELLM] = Side(proxy, V1, litellm.MODEL, f"Authorization: Bearer {litellm.KEY}\r\n")
            proxy.freeze()
        yield [sides[name] for name in (OURS, PEER, LITELLM, SCREENS_OFF) if name in sides]


def _start(server: ServerProcess, stack: contextlib.ExitStack) -> None:
    stack.callback(server.stop)
    print(f"starting {server.name}: {shlex.join(server.command)}", file=sys.stderr)
    server.start()
    server.wait_ready()


def _server(name: str, arguments: argparse.Namespace, folder: Path) -> ServerProcess:
    port, passed = free_port(), engine_args.parse(arguments.engine_args)
    override = arguments.peer_command if name == PEER else arguments.ours_command
    if override:
        command = shlex.split(override.replace("{port}", str(port)))
    elif name == PEER:
        command = bare.peer_command(arguments.model, port, tp=arguments.tp, server_args=passed)
    else:
        command = our_command(
            port, folder / name / "data", model=arguments.model, tp=arguments.tp, server_args=passed
        )
    if name == SCREENS_OFF:
        command += ["--safety", "off"]
    return ServerProcess(name, command, port, folder / f"{name}.log")


def our_command(
    port: int, data_dir: Path, *, model: str, tp: int = 1, server_args: Mapping[str, Any] | None = None
) -> list[str]:
    """How ours is started: every setting at its default but where and what it serves, and one.

    The prompts are words in no order, of which the screens would refuse one in some hundreds:
    they judge all the same, and only take note.
    """
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    policy = data_dir.with_name("policy.toml")
    policy.write_text('action = "flag"\n')
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--data-dir", str(data_dir)]
    command += ["--safety-policy", str(policy)]
    if model:
        command += ["--model", model]
    if server_args:
        config = data_dir.with_name("tokenring.toml")
        config.write_text(engine_args.config(server_args))
        command += ["--config", str(config)]
    return command if tp == 1 else [*command, "--tp", str(tp)]


def _progress(number: int, turn: Turn) -> str:
    figures = [
        f"{name}: {run.serving_cpu_us_per_token:.1f} us of CPU a token, {run.tokens_per_s:.0f} tokens/s, "
        f"TTFT p50 {run.ttft_p50_ms:.0f} ms, others used {run.other_cpus:.2f} CPUs"
        for name, run in turn.runs.items()
    ]
    return f"{turn.runs[OURS].streams} streams, pair {number + 1}: {'; '.join(figures)}"


def _note(turns: Sequence[Turn]) -> str:
    ours, peer = ([turn.runs[name] for turn in turns] for name in (OURS, PEER))
    others = [run.other_cpus for turn in turns for run in turn.runs.values()]
    return (
        f"{ours[0].streams} streams: {len(turns)} pairs of {ours[0].output_tokens} tokens "
        f"in {len({turn.start for turn in turns})} starts, every stream whole; "
        f"same text {report.same_text_share(ours, peer):.0%}; "
        f"other processes used {min(others):.2f} to {max(others):.2f} CPUs"
    )


def _write_json(arguments: argparse.Namespace, machine: dict[str, object], measured: Measured) -> None:
    options = ("streams", "pairs", "starts", "tokens", "rounds", "prompt_words", "ours_path", "engine_args")
    settings: dict[str, Any] = {
        "benchmark": "serve",
        "machine": machine,
        "options": {name: getattr(arguments, name) for name in options},
        "commands": measured.commands,
        "comparisons": [
            {"peer": peer, **report.comparison_record(item)}
            for peer, items in measured.compared().items()
            for item in items
        ],
    }
    runs = [
        {"start": turn.start, **report.run_record(number, run)}
        for turns in measured.turns.values()
        for number, turn in enumerate(turns)
        for run in turn.runs.values()
    ]
    report.write_json(arguments.json, settings, runs)
