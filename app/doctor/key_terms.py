"""Remarks on a key's terms: models that are not served, a budget that bounds nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from pathlib import Path

from app.core import KeyTerms
from app.engine_factory import names_of
from app.metering.pricing import PriceTable
from app.settings import Settings, SettingsError
from app.store.ledger import Price
from app.store.opening import holder


def remarks(terms: KeyTerms, settings: Settings, data_dir: Path) -> list[str]:
    """A sentence for each, by the settings and by the server that runs on the data directory, if one does."""
    configured, server = names_of(settings), holder(data_dir)
    loaded = () if server is None else server.models
    served = loaded or configured
    unserved = [] if terms.models is None or not served else [n for n in terms.models if n not in served]
    lines = [_unserved(name, configured, loaded) for name in unserved]
    if terms.budget_micro_usd is not None:
        usable = served if terms.models is None else [n for n in terms.models if n not in unserved]
        lines += _unbounded(usable, settings)
    return lines


def _unserved(name: str, configured: Collection[str], loaded: Collection[str]) -> str:
    if name in configured:
        return f"The model {name!r} is in the settings, but the server has not loaded it."
    if loaded:
        return f"No model is called {name!r}: the server has loaded {_listed(loaded)}."
    return (
        f"No model is called {name!r}: the settings name {_listed(configured)}. No server runs to be asked;"
        " one that is started with other flags may have it."
    )


def _unbounded(models: Collection[str], settings: Settings) -> Iterator[str]:
    try:
        prices = PriceTable.parse(settings.prices)
    except SettingsError as error:
        yield f"The prices cannot be read: {error}"
        return
    free = [name for name in models if prices.price_of(name, time.time_ns() // 1000) == Price()]
    if free:
        yield (
            f"The budget does not bound {_listed(free)}, unless the server has other settings:"
            " those read here have no price for it."
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))
