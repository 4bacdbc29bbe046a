"""A model's backend: its engine, and the admission in front of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from app.admission.admit import Admission
from app.core import ChatRequest, Engine, Health, Key, Tier
from app.errors import EngineNotReady

PRIORITIES: Mapping[Tier, int] = {"interactive": 20, "standard": 10, "batch": 0}
"""SGLang sets a request aside for one that is more than ten above it: batch for interactive, no other."""


def with_priority_and_salt(
    request: ChatRequest, key: Key | None, *, isolated: bool, resumable: bool = False
) -> ChatRequest:
    """The request with its key's terms: its priority, and the keys that share its cached prompts."""
    salt = f"owner:{request.owner}" if isolated else ""
    tier: Tier = "standard" if key is None else key.terms.tier
    placed = request.with_placement(cache_salt=salt, priority=PRIORITIES[tier])
    return replace(placed, resumable=resumable)


@dataclass(frozen=True, slots=True)
class Backend:
    """One model's engine, and the admission before it."""

    engine: Engine
    admission: Admission
    name: str = ""
    """The model's, where that is known before the engine has started."""
    retry_after_s: Callable[[], int] = lambda: 5
    """Seconds after which a request that finds no engine is to be sent again."""

    @property
    def id(self) -> str:
        """The model's name in requests. Raises EngineNotReady while the engine has not told it."""
        return self.name or self.engine.model.id

    @property
    def ready(self) -> bool:
        """True if the engine takes requests."""
        return self.engine.health() is Health.READY

    def check_ready(self) -> None:
        """Raise EngineNotReady unless it does."""
        if not self.ready:
            state, wait_s = self.engine.health().value, self.retry_after_s()
            raise EngineNotReady(f"The engine is {state}; see /readyz.", retry_after_s=wait_s)

    def precheck(self, request: ChatRequest, key: Key | None) -> None:
        """Refuse at once what would be refused later. Raises EngineNotReady, KeyOverloaded, Overloaded."""
        self.check_ready()
        self.admission.precheck(request, key)


class Backends:
    """The models that this process serves: the large one, and a small one beside it where there is one."""

    def __init__(self, large: Backend, small: Backend | None = None) -> None:
        self.large = large
        self.small = small

    def __iter__(self) -> Iterator[Backend]:
        return iter((self.large,) if self.small is None else (self.large, self.small))

    def of(self, model: str) -> Backend:
        """The backend of a model, also while it is down; the large model's for any other name."""
        small = self.small
        return small if small is not None and small.id == model else self.large

    def allowed(self, models: Collection[str] | None) -> list[Backend]:
        """The backends of a key that may use `models`; all of them for None."""
        return [backend for backend in self if models is None or backend.id in models]
