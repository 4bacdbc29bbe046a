"""What only the garbage collector frees: held in cycles, by name."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_cycles(most: int = 20) -> Iterator[None]:
    """What runs within leaves the collector fewer than `most` objects; those before it do not count."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        assert gc.collect() < most, Counter(map(_name, gc.garbage)).most_common(30)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _name(found: object) -> str:
    """What it is: a type's name, or of code also where it stands."""
    code = getattr(found, "__code__", None) or getattr(found, "cr_code", None)
    where = "" if code is None else f" {code.co_qualname} in {code.co_filename}"
    return f"{type(found).__module__}.{type(found).__qualname__}{where}"
