"""The number of networks that a key is used from, without keeping an address."""

import pytest

from app.metering import addresses
from app.metering.addresses import Addresses
from tests.support.admissions import key_of


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """A clock at zero."""
    return Clock()


@pytest.mark.parametrize(
    ("first", "second", "networks"),
    [
        ("192.0.2.1", "192.0.2.250", 1),
        ("192.0.2.1", "192.0.3.1", 2),
        ("2001:db8:1::1", "2001:db8:1:ffff::1", 1),
        ("2001:db8:1::1", "2001:db8:2::1", 2),
        ("::ffff:192.0.2.1", "192.0.2.9", 1),
        ("fe80::1%eth0", "fe80::2%eth1", 1),
        ("unix", "unix", 1),
        ("unix", "other", 2),
    ],
)
def test_addresses_of_one_network_count_once(clock: Clock, first: str, second: str, networks: int) -> None:
    """An IPv4 /24, an IPv6 /48, a mapped address as the IPv4 that it is, a name as it is."""
    seen, key = Addresses(clock), key_of("a")
    seen.saw(key, first)
    seen.saw(key, second)
    assert [used.networks for used in seen.within(60.0, 1)] == [networks]


def test_what_is_older_than_the_time_asked_for_does_not_count(clock: Clock) -> None:
    """The time of a network is that of its last use."""
    seen, key = Addresses(clock), key_of("a")
    seen.saw(key, "192.0.2.1")
    clock.now_s = 50.0
    seen.saw(key, "192.0.3.1")
    clock.now_s = 100.0
    assert [used.networks for used in seen.within(60.0, 1)] == [1]
    assert list(seen.within(60.0, 2)) == []


def test_no_address_is_kept(clock: Clock) -> None:
    """What is remembered differs from one process to the next, and is no part of an address."""
    first, second, key = Addresses(clock), Addresses(clock), key_of("a")
    for seen in (first, second):
        seen.saw(key, "192.0.2.1")
    [[one]], [[other]] = first._seen.values(), second._seen.values()
    assert one != other
    assert bytes([192, 0, 2]) not in one


def test_memory_has_an_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key used longest ago goes first, and of a key the network used longest ago."""
    monkeypatch.setattr(addresses, "MAX_KEYS", 2)
    monkeypatch.setattr(addresses, "MAX_NETWORKS", 3)
    seen = Addresses(clock)
    for name in ("a", "b", "c"):
        for number in range(5):
            seen.saw(key_of(name), f"192.0.{number}.1")
    assert [(used.key_id, used.networks) for used in seen.within(1.0, 1)] == [
        (key_of(name).id, 3) for name in ("b", "c")
    ]
