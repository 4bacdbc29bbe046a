"""`bench screen`: what the safety screens cost: Tokenring with safety on and off, in interleaved pairs.

Two servers that differ only in `--safety` are up at once, take turns and are started anew as in `bench
serve`. The policy is the built-in one, with its real actions. Prompts that it would refuse or watch are
left out, because a watched prompt is meant to wait. A stream that is halted is left out on both sides, and
counted. Where TTFT is measured, answers are short; where ITL and total time are measured, they have 200
tokens or more. Last, the CPU of the stream screen alone is measured on the answers of 64 of these streams,
and the time of the prompt screen's part that comes before the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.benchmarks import report, starts
from scripts.benchmarks.driver import RunResult, served_model
from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import ServerProcess, free_port
from scripts.benchmarks.prompts import Work
from scripts.benchmarks.screen_cpu import (
    CpuFigure,
    PrescreenFigure,
    PromptJudge,
    measure_cpu,
    measure_prescreen,
)
from scripts.benchmarks.screen_switch import SEEDS
from scripts.benchmarks.screen_work import OFF, ON, OrdinaryChats, questions, sides_in_turn
from scripts.benchmarks.serve import WARM_UP, take_turn

MAX_LEFT_OUT = 0.25
"""Of a run's streams; with more it would measure something else."""
MIN_TOKENS, MAX_TOKENS = 200, 400
TTFT_TOKENS = 16
PATIENCE_S = 60
"""TTFT that admission aims at: 64 requests at once wait here rather than being refused, on both sides."""
PROMPT_WORDS = 40
TTFT_FIGURES = (
    report.Figure("TTFT p50, ms", "ttft_p50_ms", "lower", 1.02),
    report.Figure("TTFT p99, ms", "ttft_p99_ms", "lower"),
)
FLOW_FIGURES = (
    report.Figure("ITL p99, ms", "token_itl_p99_ms", "lower", 1.05),
    report.Figure("total time of a stream, ms", "e2e_mean_ms", "lower", 1.01),
    report.Figure("ITL p50, ms", "itl_p50_ms", "lower"),
    report.Figure("longest gap of a stream, p50, ms", "longest_gap_p50_ms", "lower"),
    report.Figure("TTFT p50, ms", "ttft_p50_ms", "lower"),
    report.Figure("output tokens/s", "tokens_per_s", "higher"),
    report.Figure("CPU per token, us", "serving_cpu_us_per_token", "lower"),
    report.Figure("frames per token", "frames_per_token", "higher"),
)


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams at once, and what is looked at."""

    about: str
    streams: int
    requests: int
    mean_tokens: int
    spread: float
    figures: tuple[report.Figure, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The pairs of one load, of which start each is, and how many of their streams were left out."""

    load: Load
    pairs: list[tuple[RunResult, RunResult]]
    starts: list[int]
    left_out: list[int]
    one_server: bool = False

    def compared(self) -> list[report.Comparison]:
        """Every figure, on against off."""
        return report.compare(self.load.figures, *_sides(self), self.starts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench screen`."""
    parser.add_argument("--pairs", type=int, default=18, help="measured pairs per load (default: 18)")
    starts.add_argument(parser)
    parser.add_argument(
        "--ttft-streams", default="1,4", help="requests at once where TTFT is measured (default: 1,4)"
    )
    parser.add_argument(
        "--streams", default="4,64", help="streams at once where ITL is measured (default: 4,64)"
    )
    parser.add_argument("--requests", type=int, default=64, help="requests per run (default: 64)")
    parser.add_argument("--model", default="", help="path or hub id (default: the built-in model)")
    parser.add_argument("--path", default="/api/chat/completions", help="where chats are sent")
    parser.add_argument(
        "--prompt-words", type=int, default=PROMPT_WORDS, help=f"words per prompt (default: {PROMPT_WORDS})"
    )
    parser.add_argument(
        "--questions", action="store_true", help="questions as prompts instead of random words"
    )
    parser.add_argument(
        "--encoder",
        choices=("always", "shipped"),
        help="the encoder alone: safety on both sides, and `off` reads no prompt with it; `on` reads every "
        "prompt, or those that the product does",
    )
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="one server that screens every other request, so that no two processes differ",
    )
    parser.add_argument("--no-cpu", action="store_true", help="leave out the CPU of the stream screen")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine and every run")
    parser.add_argument(
        "--command", help="start both servers with this command, {port} and {safety} replaced"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table for each load, write what was asked for."""
    if arguments.command and (arguments.encoder or arguments.one_process):
        raise SystemExit("--encoder and --one-process start both sides themselves; leave --command out.")
    machine, judge = describe_machine(), PromptJudge(encoder=arguments.encoder == "always")
    chats = OrdinaryChats(judge, arguments.prompt_words, questions() if arguments.questions else ())
    turns = list(starts.spread(arguments.pairs, arguments.starts))
    measured = [Measured(load, [], [], [], arguments.one_process) for load in _loads(arguments)]
    alone: list[CpuFigure | PrescreenFigure] = []
    try:
        for start, numbers in enumerate(turns):
            with (
                tempfile.TemporaryDirectory() as folder,
                _both(arguments, Path(folder), (ON, OFF) if start % 2 else (OFF, ON)) as (on, off, model),
            ):
                for each in measured:
                    if arguments.one_process:
                        _measure_in_one(each, numbers, on, model, chats, arguments)
                    else:
                        _measure(each, start, numbers, (on, off), model, chats, arguments)
                if numbers.stop == arguments.pairs and not arguments.no_cpu:
                    load = replace(measured[-1].load, requests=64)
                    work = _work(chats, model, load, 9_000_000)
                    on.thaw()
                    alone = [*measure_cpu(judge, on.port, work), measure_prescreen(judge)]
    finally:  # cut short, a run still tells what it has
        _tell(arguments, machine, [each for each in measured if each.pairs], alone, judge)
    return 0


def _loads(arguments: argparse.Namespace) -> list[Load]:
    mean, spread = (MIN_TOKENS + MAX_TOKENS) // 2, (MAX_TOKENS - MIN_TOKENS) / (MAX_TOKENS + MIN_TOKENS)
    first = [
        Load("first token", streams, arguments.requests, TTFT_TOKENS, 0.0, TTFT_FIGURES)
        for streams in _numbers(arguments.ttft_streams)
    ]
    flow = [
        Load("flow", streams, max(streams, arguments.requests // 4), mean, spread, _flow_figures(arguments))
        for streams in _numbers(arguments.streams)
    ]
    return first + flow


def _flow_figures(arguments: argparse.Namespace) -> tuple[report.Figure, ...]:
    """Without those of a whole process, where both sides are one."""
    whole = ("tokens_per_s", "serving_cpu_us_per_token") if arguments.one_process else ()
    return tuple(figure for figure in FLOW_FIGURES if figure.attribute not in whole)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _measure(
    measured: Measured,
    start: int,
    numbers: Iterable[int],
    sides: tuple[ServerProcess, ServerProcess],
    model: str,
    chats: OrdinaryChats,
    arguments: argparse.Namespace,
) -> None:
    """Fill in pairs, after one that is not measured; both sides of a pair get the same requests."""
    load, (on, off) = measured.load, sides
    for number in (WARM_UP, *numbers):
        work = _work(chats, model, load, _seed(load, number))
        recorded = {}
        for server in (on, off) if number % 2 == 0 else (off, on):
            plan = LoadPlan(
                "127.0.0.1", server.port, arguments.path, work.bodies, work.output_tokens, load.streams
            )
            recorded[server.name] = take_turn(server, plan)
        recorded[OFF].check_whole()
        left_out = recorded[ON].failed()
        if len(left_out) > MAX_LEFT_OUT * load.requests:
            recorded[ON].check_whole()
        if number != WARM_UP:
            measured.starts.append(start)
            pair = recorded[ON].result(left_out), recorded[OFF].result(left_out)
            measured.pairs.append(pair)
            measured.left_out.append(len(left_out))
            print(_progress(load, number, *pair), file=sys.stderr)


def _measure_in_one(
    measured: Measured,
    numbers: Iterable[int],
    server: ServerProcess,
    model: str,
    chats: OrdinaryChats,
    arguments: argparse.Namespace,
) -> None:
    """Fill in pairs of one server that has both ways: the requests of a run take turns, one by one."""
    load = measured.load
    for number in (WARM_UP, *numbers):
        work = _work(chats, model, load, _seed(load, number))
        turns = sides_in_turn(len(work.bodies), number)
        bodies = [_switched(work.bodies[at // 2], side) for at, side in enumerate(turns)]
        tokens = [work.output_tokens[at // 2] for at in range(len(turns))]
        recorded = take_turn(
            server, LoadPlan("127.0.0.1", server.port, arguments.path, bodies, tokens, load.streams)
        )
        failed, places = recorded.failed(), range(len(bodies))
        if any(turns[at] == OFF for at in failed) or len(failed) > MAX_LEFT_OUT * load.requests:
            recorded.check_whole()
        left_out = {at for at in places if at in failed or at ^ 1 in failed}
        if number != WARM_UP:
            on, off = (
                recorded.result(left_out | {at for at in places if turns[at] != side}) for side in (ON, OFF)
            )
            measured.starts.append(number)  # nothing of a start is between the two
            measured.pairs.append((on, off))
            measured.left_out.append(len(failed))
            print(_progress(load, number, on, off), file=sys.stderr)


def _switched(body: str, side: str) -> str:
    """A body for one side of a server that has both: other letters at once, for what it has cached."""
    parsed = json.loads(body)
    parsed["seed"] = SEEDS[side]
    parsed["messages"][0]["content"] = f"{SEEDS[side]}{parsed['messages'][0]['content']}"
    return json.dumps(parsed)


def _seed(load: Load, number: int) -> int:
    return 1_000_000 * load.streams + 1_000 * len(load.about) + number + 1


def _work(chats: OrdinaryChats, model: str, load: Load, seed: int) -> Work:
    return chats.work(model, load.requests, mean_tokens=load.mean_tokens, spread=load.spread, seed=seed)


@contextlib.contextmanager
def _both(
    arguments: argparse.Namespace, folder: Path, order: Sequence[str]
) -> Iterator[tuple[ServerProcess, ServerProcess, str]]:
    """Both servers, started in that order, up and frozen, and the id of their model."""
    with contextlib.ExitStack() as stack:
        sides, model = {}, ""
        for safety in order[:1] if arguments.one_process else order:
            port = free_port()
            command, log = _command(arguments, port, safety, folder), folder / f"{safety}.log"
            server = ServerProcess(safety, command, port, log, ready_path="/readyz")
            stack.callback(server.stop)
            print(f"starting {safety}: {shlex.join(server.command)}", file=sys.stderr)
            server.start()
            server.wait_ready()
            sides[safety] = server
            model = served_model(port)
            server.freeze()
        first = sides[order[0]]
        yield sides.get(ON, first), sides.get(OFF, first), model


def _command(arguments: argparse.Namespace, port: int, safety: str, folder: Path) -> list[str]:
    if arguments.command:
        return shlex.split(arguments.command.replace("{port}", str(port)).replace("{safety}", safety))
    program, judged = ["app"], safety
    if arguments.one_process:
        program, judged = ["scripts.benchmarks.screen_switch", arguments.encoder or "screens"], ON
    elif arguments.encoder:
        reads = arguments.encoder if safety == ON else "never"
        program, judged = ["scripts.benchmarks.encoder_set", reads], ON
    command = [sys.executable, "-m", *program, "serve", "--port", str(port), "--safety", judged]
    command += ["--data-dir", str(folder / safety), "--ttft-target-s", str(PATIENCE_S)]
    return [*command, "--model", arguments.model] if arguments.model else command


def _tell(
    arguments: argparse.Namespace,
    machine: dict[str, object],
    measured: list[Measured],
    cpu: Sequence[CpuFigure | PrescreenFigure],
    judge: PromptJudge,
) -> None:
    for each in measured:
        print(f"\n{each.load.about}, answers of {_lengths(each.load)} tokens:\n")
        print(report.markdown_table(each.compared(), OFF, ours=ON))
        print(_footnote(each))
    if cpu:
        print("\nthe screens alone:\n")
        print("\n".join(figure.line() for figure in cpu))
    print(
        f"\n{judge.refused} of {judge.asked} prompts were left out: the policy would refuse or watch them; "
        f"of the others the encoder would read {judge.unsure}"
    )
    if arguments.json:
        _write_json(arguments, machine, measured, cpu)


def _lengths(load: Load) -> str:
    return f"{MIN_TOKENS} to {MAX_TOKENS}" if load.spread else str(load.mean_tokens)


def _footnote(measured: Measured) -> str:
    runs = [run for pair in measured.pairs for run in pair]
    others = [run.other_cpus for run in runs]
    merged = [max(run.merged_share for run in side) for side in _sides(measured)]
    where = "one server" if measured.one_server else f"{len(set(measured.starts))} starts"
    return (
        f"{len(runs) // 2} pairs of {measured.load.requests} requests in {where}; "
        f"{sum(measured.left_out)} halted and left out; "
        f"in a frame with another: at most {merged[0]:.2%} of tokens {ON}, {merged[1]:.2%} {OFF}; "
        f"other processes used {min(others):.2f} to {max(others):.2f} CPUs"
    )


def _sides(measured: Measured) -> tuple[list[RunResult], list[RunResult]]:
    return [on for on, _ in measured.pairs], [off for _, off in measured.pairs]


def _progress(load: Load, number: int, on: RunResult, off: RunResult) -> str:
    return (
        f"{load.about}, {load.streams} streams, pair {number + 1}: "
        f"TTFT p50 {on.ttft_p50_ms:.1f} : {off.ttft_p50_ms:.1f} ms, "
        f"ITL p99 {on.token_itl_p99_ms:.1f} : {off.token_itl_p99_ms:.1f} ms, "
        f"total {on.e2e_mean_ms:.0f} : {off.e2e_mean_ms:.0f} ms, "
        f"others used {on.other_cpus:.2f} : {off.other_cpus:.2f} CPUs"
    )


def _write_json(
    arguments: argparse.Namespace,
    machine: dict[str, object],
    measured: list[Measured],
    cpu: Sequence[CpuFigure | PrescreenFigure],
) -> None:
    options = (
        "pairs",
        "starts",
        "prompt_words",
        "questions",
        "encoder",
        "one_process",
        "command",
        "ttft_streams",
        "streams",
        "requests",
        "path",
    )
    settings: dict[str, object] = {
        "benchmark": "screen",
        "machine": machine,
        "options": {name: getattr(arguments, name) for name in options},
        "comparisons": [
            {"load": each.load.about, **report.comparison_record(item)}
            for each in measured
            for item in each.compared()
        ],
        "left_out": {f"{each.load.about}, {each.load.streams}": sum(each.left_out) for each in measured},
        "screen_cpu": [asdict(figure) for figure in cpu],
    }
    runs = [
        {"load": each.load.about, "start": start, **report.run_record(number, run)}
        for each in measured
        for number, (start, pair) in enumerate(zip(each.starts, each.pairs, strict=True))
        for run in pair
    ]
    report.write_json(arguments.json, settings, runs)
