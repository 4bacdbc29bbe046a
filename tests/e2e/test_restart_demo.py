"""The demonstration of the README: an answer goes on over a restart of the server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_the_joined_text_is_that_of_an_answer_without_a_restart() -> None:
    """Nothing is missing, nothing is there twice, and the event ids go on."""
    command = [ROOT / "scripts/restart_demo", "--engine", "scripted", "--scripted", "rate=20,tokens=40"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    [last] = re.findall(r"before the restart, events 1 to (\d+):", ran.stdout)
    assert f"after it, events {int(last) + 1} to " in ran.stdout
    assert ran.stdout.endswith("The same answer without a restart has the same text.\n")
