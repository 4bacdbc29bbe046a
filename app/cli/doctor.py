"""`tokenring doctor`: what a start needs, checked without one. `serve` prints its failures when it fails."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping

from app import settings as settings_module
from app.cli import tables
from app.settings import Settings, SettingsError

EXIT_OK = 0
EXIT_FAILURES = 1


def run(flags: Mapping[str, object], args: argparse.Namespace) -> int:
    """Print the findings for the settings that `serve` would have; 1 where one is a failure."""
    from app.doctor import report

    findings: report.Findings = {}
    settings = Settings()
    try:
        settings = settings_module.load(flags, os.environ, args.config)
    except SettingsError as error:
        findings = {"settings": report.unreadable(error)}
    with tables.working("checking"):
        findings = {**findings, **report.examine(settings)}
    if args.json:
        print(json.dumps(report.as_json(findings)))
    else:
        rows = [(name, f.status.replace("_", " "), f.detail, f.advice) for name, f in findings.items()]
        print(tables.text(("check", "status", "found", "to do"), rows))
    return EXIT_FAILURES if report.failures(findings) else EXIT_OK


def print_failures(settings: Settings) -> None:
    """Print a line for each failure that keeps a server with these settings from starting."""
    from app.doctor import report

    for line in report.failures(report.examine(settings, starting=True)):
        print(f"doctor: {line}", file=sys.stderr, flush=True)
