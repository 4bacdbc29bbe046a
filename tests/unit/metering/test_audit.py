"""The ledger against the token ids handed over: what raises the flag and what does not."""

from __future__ import annotations

import pytest
import structlog

from app.metering.audit import AuditSums, LedgerAudit

QUIET = {"differs": False, "differing_requests": 0, "drift_tokens": 0, "last_request_id": None}


@pytest.fixture
def log() -> structlog.testing.LogCapture:
    """What is logged."""
    return structlog.testing.LogCapture()


@pytest.fixture
def balance(log: structlog.testing.LogCapture) -> LedgerAudit:
    """Nothing settled yet."""
    return LedgerAudit(structlog.wrap_logger(None, processors=[log]))


def test_equal_counts_are_quiet(balance: LedgerAudit, log: structlog.testing.LogCapture):
    """Requests that agree add up, per model, and say nothing."""
    balance.compare("a", "r1", 7, 7)
    balance.compare("a", "r2", 0, 0, read_whole=False)
    balance.compare("b", "r3", 5, 5)
    assert balance.models == {"a": AuditSums(7, 7), "b": AuditSums(5, 5)}
    assert balance.detail() == QUIET
    assert log.entries == []


@pytest.mark.parametrize("read_whole", [True, False])
def test_a_bill_too_high_differs(balance: LedgerAudit, read_whole: bool):
    """More billed than was handed over raises the flag, however the generation ended."""
    balance.compare("a", "r1", 8, 7, read_whole=read_whole)
    assert balance.differs
    assert balance.models["a"] == AuditSums(8, 7, 0, 1, 1)


def test_a_bill_too_low_differs(balance: LedgerAudit):
    """Less billed than was handed over raises the flag, once everything was read."""
    balance.compare("a", "r1", 5, 7)
    assert balance.models["a"] == AuditSums(5, 7, 0, 1, 2)


def test_what_was_not_read_is_explained(balance: LedgerAudit):
    """Tokens that a generation broke off before are counted apart, and raise nothing."""
    balance.compare("a", "r1", 5, 7, read_whole=False)
    assert balance.models["a"] == AuditSums(5, 7, unread_tokens=2)
    assert balance.detail() == QUIET


def test_differences_do_not_cancel_each_other(balance: LedgerAudit):
    """One token too many and one too few are two that differ, in one model or in two."""
    balance.compare("a", "r1", 8, 7)
    balance.compare("a", "r2", 6, 7)
    balance.compare("b", "r3", 1, 3)
    detail = {"differs": True, "differing_requests": 3, "drift_tokens": 4, "last_request_id": "r3"}
    assert balance.detail() == detail


def test_the_flag_stays(balance: LedgerAudit):
    """Requests that agree do not take it back."""
    balance.compare("a", "r1", 8, 7)
    for number in range(100):
        balance.compare("a", f"later-{number}", 7, 7)
    assert balance.differs
    assert balance.last_request_id == "r1"


def test_each_that_differs_is_one_warning(balance: LedgerAudit, log: structlog.testing.LogCapture):
    """The log has the id and both counts."""
    balance.compare("a", "r1", 8, 7)
    balance.compare("a", "r2", 7, 7)
    [line] = log.entries
    assert (line["event"], line["log_level"], line["request_id"]) == ("ledger_differs", "warning", "r1")
    assert (line["completion_tokens"], line["emitted_tokens"]) == (8, 7)
