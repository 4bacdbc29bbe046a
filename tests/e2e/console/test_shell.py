"""The console's frame: signing in, what the server is doing, themes, keyboard, sizes."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.support.console import axe


def test_a_remembered_key_opens_the_console(page: Page):
    """The views are there, those of an administrator too."""
    expect(page.get_by_role("link", name="Admin")).to_be_visible()
    assert axe(page) == []
