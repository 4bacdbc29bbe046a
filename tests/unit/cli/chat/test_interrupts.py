"""Ctrl-C ends a wait, and never the work between two waits."""

from __future__ import annotations

import os
import signal

import pytest

from app.cli.chat.interrupts import Interrupts


def press() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def test_a_wait_is_interrupted():
    """At once."""
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.waiting():
        press()


def test_work_is_not_interrupted_but_the_next_wait_is():
    """Once for each time that it was pressed before; the wait after it is a wait."""
    done = []
    with Interrupts() as interrupts:
        press()
        done.append("work")
        with pytest.raises(KeyboardInterrupt), interrupts.waiting():
            done.append("wait")
        with interrupts.waiting():
            done.append("wait again")
    assert done == ["work", "wait again"]


def test_afterwards_ctrl_c_is_as_it_was():
    """The handler of whoever ran us is back."""
    handler = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not handler
    assert signal.getsignal(signal.SIGINT) is handler
