"""Traces for OpenTelemetry: what keeps a server with them from starting."""

from __future__ import annotations

import sys

import pytest

from app.pipeline.spans import Spans
from app.settings import SettingsError


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "/v1/traces", "http://"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    """Anything else is refused at the start, with an example."""
    with pytest.raises(SettingsError, match=r"otlp_endpoint: .*http://127\.0\.0\.1:4318"):
        Spans(endpoint)


def test_without_the_packages_the_error_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are an extra."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match="pip install opentelemetry-exporter"):
        Spans("http://127.0.0.1:4318")
