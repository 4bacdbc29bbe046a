"""Requests as admins watch them: those in the pipeline, those that ended lately, and samples of the load.

No token passes through here. A request is noted when it begins and when it ends; all else is read of its
trace and its stream when somebody asks.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from app.core import Key
from app.pipeline.trace import Trace
from app.stream.token_stream import TokenStream

RECENT_S = 300.0
"""Seconds for which ended requests are shown, and over which percentiles are taken."""
MAX_ENDED = 1000
"""Requests that are remembered after their end. If more than 3 end per second, these cover less than
RECENT_S seconds."""
MAX_FAILED = 200
SAMPLE_S = 5.0
MAX_SAMPLES = 120
"""Samples of the load that are kept: ten minutes."""
OPENED_ID = 1
"""The last event of a stream of which nothing but the beginning is released."""


class LiveRequest(NamedTuple):
    """A request in the pipeline."""

    trace: Trace
    stream: TokenStream
    key: Key | None

    @property
    def key_id(self) -> str | None:
        return None if self.key is None else self.key.id

    @property
    def key_name(self) -> str | None:
        return None if self.key is None else self.key.terms.name

    def phase(self, *, engine_ready: bool) -> tuple[str, float]:
        """The stage that it is in, and for how many seconds: one of its trace's, `held` or `resuming`."""
        stages = self.trace.stages()
        now_s = stages[-1].ends_s
        if stages[-1].name == "settle" and self.trace.unfinished:
            stages.pop()  # another choice goes on
        name, begins_s, _ = stages[-1]
        if name in ("prefill", "decode") and not engine_ready:
            name = "resuming"
        elif name == "decode" and self.stream.last_id <= OPENED_ID:
            name = "held"
        return name, now_s - begins_s


class EndedRequest(NamedTuple):
    """A request that has left the pipeline. `fields` are those of its log line."""

    ended_s: float
    ended_at_unix_s: int
    owner: str
    key_name: str | None
    cancelled: str | None
    fields: Mapping[str, Any]


class LiveRequests:
    """Every request in the pipeline, oldest first, and those that ended lately, newest first."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._live: dict[Trace, LiveRequest] = {}
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_ENDED)
        self._failed: deque[EndedRequest] = deque(maxlen=MAX_FAILED)
        self._ended_tokens = 0

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    @contextlib.contextmanager
    def tracked(self, stream: TokenStream, trace: Trace, key: Key | None) -> Iterator[None]:
        """Show a request for as long as it is in the pipeline, and for a while after its end."""
        live = self._live[trace] = LiveRequest(trace, stream, key)
        self._ended_tokens -= trace.completion_tokens  # an earlier process generated these
        try:
            yield
        finally:
            del self._live[trace]
            self._ended_tokens += trace.completion_tokens
            ended = EndedRequest(
                self._clock_s(),
                int(time.time()),
                stream.request.owner,
                live.key_name,
                stream.cancelled,
                trace.fields(),
            )
            failed = ended.fields["error"] is not None
            (self._failed if failed else self._ended).append(ended)

    def ended(self) -> Iterable[EndedRequest]:
        """Those that came to an answer, stopped ones too."""
        return self._lately(self._ended)

    def failed(self) -> Iterable[EndedRequest]:
        """Those that ended in an error, or were refused."""
        return self._lately(self._failed)

    def _lately(self, ended: deque[EndedRequest]) -> Iterable[EndedRequest]:
        oldest_s = self._clock_s() - RECENT_S
        return (request for request in reversed(ended) if request.ended_s >= oldest_s)

    @property
    def generated_tokens(self) -> int:
        """Tokens generated since the process began; of several models together."""
        return self._ended_tokens + sum(live.trace.completion_tokens for live in self._live.values())


class LoadSample(NamedTuple):
    """The load at a moment. `generated_tokens` is a count since the process began."""

    at_unix_s: float
    running: int
    waiting: int
    used_tokens: int
    generated_tokens: int
    loop_lag_s: float = 0.0
    """The longest delay of the event loop since the sample before."""


class LoadHistory:
    """Samples of the last minutes."""

    def __init__(self, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._samples: deque[LoadSample] = deque(maxlen=MAX_SAMPLES)
        self._loop_lag_s = 0.0

    def observe(self, loop_lag_s: float, read: Callable[[float], LoadSample]) -> None:
        """Note a delay of the event loop, and take a sample with `read` if it is time."""
        self._loop_lag_s = max(self._loop_lag_s, loop_lag_s)
        now_s = self._clock_s()
        if not self._samples or abs(now_s - self._samples[-1].at_unix_s) >= SAMPLE_S:
            self._samples.append(read(now_s)._replace(loop_lag_s=self._loop_lag_s))
            self._loop_lag_s = 0.0

    def rates(self) -> Iterator[tuple[LoadSample, float]]:
        """Each sample but the first, oldest first, with the tokens per second since the one before."""
        for earlier, sample in pairwise(self._samples):
            span_s = max(sample.at_unix_s - earlier.at_unix_s, 1e-3)
            yield sample, (sample.generated_tokens - earlier.generated_tokens) / span_s


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of `ordered`, which is not empty, does not exceed."""
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]
