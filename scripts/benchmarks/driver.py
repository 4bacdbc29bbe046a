"""One loaded run of one server: the load generator beside it, CPU read at both ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.processes import CpuUse, ServerProcess, machine_busy_s
from scripts.benchmarks.stats import percentile


@dataclass(frozen=True, slots=True)
class RunResult:
    """The figures of one run. Times of a request are pooled over the run's requests."""

    server: str
    streams: int
    requests: int
    output_tokens: int
    wall_s: float
    serving_cpu_us_per_token: float
    serving_user_us_per_token: float
    engine_cpu_us_per_token: float
    load_cpu_us_per_token: float
    serving_cpus: float
    other_cpus: float
    tokens_per_s: float
    frames_per_s: float
    frames_per_serving_cpu_s: float
    frames_per_token: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    prompt_tokens: int
    cached_tokens: int
    text_sha256: list[str]
    ttft_ms: list[float]
    e2e_ms: list[float]


class RunFailed(RuntimeError):
    """A stream was not whole, so that the run measured something else."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run as it was recorded: the load generator's report, and what was used meanwhile."""

    server: str
    plan: LoadPlan
    report: dict[str, Any]
    used: CpuUse
    busy_s: float

    def failed(self) -> set[int]:
        """Which requests, by their place, were not whole to their `[DONE]`."""
        requests = self.report["requests"]
        return {at for at, request in enumerate(requests) if request["error"]}

    def check_whole(self) -> None:
        """Raises RunFailed unless every stream was whole."""
        _check_whole(self.server, self.plan, self.report)

    def result(self, leave_out: Collection[int] = ()) -> RunResult:
        """The figures, of the requests but those left out; what was used is over the tokens of all."""
        others_s = self.busy_s - self.used.serving_s - self.used.engine_s - self.report["load_cpu_s"]
        return _summary(self, others_s, leave_out)


def run_load(server: ServerProcess, plan: LoadPlan, *, load_cpus: set[int] | None = None) -> RunResult:
    """Run `plan` against `server`. Raises RunFailed unless every stream was whole to its `[DONE]`."""
    recorded = record_load(server, plan, load_cpus=load_cpus)
    recorded.check_whole()
    return recorded.result()


def record_load(server: ServerProcess, plan: LoadPlan, *, load_cpus: set[int] | None = None) -> Recorded:
    """Run `plan` against `server`, whatever becomes of its streams. Raises RunFailed where none was sent."""
    with subprocess.Popen(
        [sys.executable, "-m", "scripts.benchmarks.load"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_pinner(load_cpus),  # noqa: PLW1509  this process has no other thread that holds a lock
    ) as generator:
        say, hear = dialogue(generator)
        try:
            say(json.dumps(asdict(plan)))
            hear("ready")
            busy_before_s, cpu_before = machine_busy_s(), server.cpu()
            say("go")
            hear("done")
            used, busy_s = server.cpu() - cpu_before, machine_busy_s() - busy_before_s
            report = json.loads(hear())
        except BaseException:
            generator.kill()
            raise
    if len(report["requests"]) < len(plan.bodies):
        raise RunFailed(f"{server.name}: {len(report['requests'])} of {len(plan.bodies)} requests were sent")
    return Recorded(server.name, plan, report, used, busy_s)


def served_model(port: int) -> str:
    """The id of the first model the server lists."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as response:
        model_id: str = json.load(response)["data"][0]["id"]
    return model_id


def freeze_gc(port: int) -> None:
    """SGLang's own remedy against long garbage collections: the peer is measured at its best."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/freeze_gc", method="POST")
    urllib.request.urlopen(request, timeout=30).close()


def _pinner(cpus: set[int] | None) -> Callable[[], None] | None:
    return None if cpus is None else lambda: os.sched_setaffinity(0, cpus)


def dialogue(generator: subprocess.Popen[str]) -> tuple[Callable[[str], None], Callable[..., str]]:
    """To say a line to a load process, and to hear one, which may have to be the expected one."""
    stdin, stdout = generator.stdin, generator.stdout
    assert stdin is not None
    assert stdout is not None

    def say(line: str) -> None:
        stdin.write(line + "\n")
        stdin.flush()

    def hear(expected: str | None = None) -> str:
        line = stdout.readline().rstrip("\n")
        if not line or (expected is not None and line != expected):
            raise RunFailed(f"the load generator said {line!r} instead of {expected or 'its report'}")
        return line

    return say, hear


def _check_whole(name: str, plan: LoadPlan, report: dict[str, Any]) -> None:
    errors = [request["error"] for request in report["requests"] if request["error"]]
    if errors:
        raise RunFailed(f"{name}: {len(errors)} of {len(plan.bodies)} streams failed; first: {errors[0]}")


def _summary(recorded: Recorded, others_s: float, leave_out: Collection[int]) -> RunResult:
    report, used = recorded.report, recorded.used
    every: list[dict[str, Any]] = report["requests"]
    requests = [request for at, request in enumerate(every) if at not in leave_out]
    tokens = sum(request["completion_tokens"] for request in every)
    frames = sum(request["content_frames"] for request in every)
    wall_s: float = report["wall_s"]
    ttft_ms = [request["ttft_s"] * 1e3 for request in requests]
    e2e_ms = [request["e2e_s"] * 1e3 for request in requests]
    itl_ms = [gap * 1e3 for request in requests for gap in request["itl_s"]]
    return RunResult(
        server=recorded.server,
        streams=recorded.plan.streams,
        requests=len(requests),
        output_tokens=tokens,
        wall_s=wall_s,
        serving_cpu_us_per_token=used.serving_s / tokens * 1e6,
        serving_user_us_per_token=used.serving_user_s / tokens * 1e6,
        engine_cpu_us_per_token=used.engine_s / tokens * 1e6,
        load_cpu_us_per_token=report["load_cpu_s"] / tokens * 1e6,
        serving_cpus=used.serving_s / wall_s,
        other_cpus=max(0.0, others_s) / wall_s,
        tokens_per_s=tokens / wall_s,
        frames_per_s=frames / wall_s,
        frames_per_serving_cpu_s=frames / used.serving_s,
        frames_per_token=frames / tokens,
        ttft_p50_ms=percentile(ttft_ms, 50),
        ttft_p99_ms=percentile(ttft_ms, 99),
        tpot_p50_ms=percentile([request["tpot_s"] * 1e3 for request in requests], 50),
        itl_p50_ms=percentile(itl_ms, 50),
        itl_p99_ms=percentile(itl_ms, 99),
        prompt_tokens=sum(request["prompt_tokens"] for request in every),
        cached_tokens=sum(request["cached_tokens"] for request in every),
        text_sha256=[request["text_sha256"][:16] for request in requests],
        ttft_ms=[round(value, 3) for value in ttft_ms],
        e2e_ms=[round(value, 3) for value in e2e_ms],
    )
