"""The kinds of metrics: name, meaning, and the function that reads each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Described(NamedTuple):
    """A metric. `read` gives its number, its histogram, or its numbers by the last label."""

    kind: Kind
    name: str
    unit: str
    meaning: str
    read: Callable[[Any], Any]
    labels: tuple[str, ...] = ("model",)


counter = partial(Described, "counter")
gauge = partial(Described, "gauge")
histogram = partial(Described, "histogram")
