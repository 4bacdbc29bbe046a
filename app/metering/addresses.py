"""The number of networks that each key was used from lately. Only hashes are kept, in memory, no address."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from app.core import Key

MAX_KEYS = 10_000
MAX_NETWORKS = 256
"""Networks that are counted for a key; more of them count as this many."""


class Used(NamedTuple):
    """A key, and the number of networks it was used from."""

    key_id: str
    owner: str
    networks: int


class Addresses:
    """The networks of each key, and when each was seen last; the key used longest ago goes first."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._secret = secrets.token_bytes(16)
        self._seen: OrderedDict[tuple[str, str], OrderedDict[bytes, float]] = OrderedDict()

    def saw(self, key: Key, address: str) -> None:
        """A key was used from an address: an IPv4 /24, an IPv6 /48, or a name as it is."""
        network = hashlib.blake2b(_network(address), digest_size=8, key=self._secret).digest()
        networks = self._seen.setdefault((key.id, key.owner), OrderedDict())
        self._seen.move_to_end((key.id, key.owner))
        networks[network] = self._clock_s()
        networks.move_to_end(network)
        if len(networks) > MAX_NETWORKS:
            networks.popitem(last=False)
        if len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)

    def within(self, duration_s: float, least: int) -> Iterator[Used]:
        """Keys that were used from at least so many networks within the last seconds."""
        since_s = self._clock_s() - duration_s
        for (key_id, owner), networks in self._seen.items():
            count = sum(at_s >= since_s for at_s in networks.values()) if len(networks) >= least else 0
            if count >= least:
                yield Used(key_id, owner, count)


def _network(address: str) -> bytes:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address.encode("utf-8", "surrogatepass")
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.packed[:3]
    mapped = ip.ipv4_mapped
    return ip.packed[:6] if mapped is None else mapped.packed[:3]
