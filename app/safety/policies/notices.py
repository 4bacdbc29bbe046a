"""The messages for people whose prompt or answer was blocked.

Numbers of help lines change. Each has the site that states it, as of 2026-11-21. An operator may replace the
message of any category (the policy's `messages`). `{help_lines}` stands for the help lines, `{contact}` for
the setting `safety_contact`, `{request_id}` for the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from app.safety.categories import BY_CODE

HELP_LINES_MARK = "{help_lines}"


class HelpLine(NamedTuple):
    """A country's help line for people in a suicidal crisis."""

    name: str
    number: str
    site: str


HELP_LINES: Mapping[str, HelpLine] = {
    "AT": HelpLine("TelefonSeelsorge", "142", "telefonseelsorge.at"),
    "AU": HelpLine("Lifeline", "13 11 14", "lifeline.org.au"),
    "BE": HelpLine("Zelfmoordlijn", "1813 (Dutch), 0800 32 123 (French)", "zelfmoord1813.be"),
    "BR": HelpLine("CVV", "188", "cvv.org.br"),
    "CA": HelpLine("Suicide Crisis Helpline", "988", "988.ca"),
    "CH": HelpLine("Die Dargebotene Hand, La Main Tendue, Telefono Amico", "143", "143.ch"),
    "DE": HelpLine("TelefonSeelsorge", "0800 111 0 111", "telefonseelsorge.de"),
    "DK": HelpLine("Livslinien", "70 201 201", "livslinien.dk"),
    "ES": HelpLine("Línea 024", "024", "sanidad.gob.es"),
    "FI": HelpLine("MIELI Crisis Helpline", "09 2525 0111", "mieli.fi"),
    "FR": HelpLine("Numéro national de prévention du suicide", "3114", "3114.fr"),
    "GB": HelpLine("Samaritans", "116 123", "samaritans.org"),
    "IE": HelpLine("Samaritans", "116 123", "samaritans.org"),
    "IN": HelpLine("Tele MANAS", "14416", "telemanas.mohfw.gov.in"),
    "MX": HelpLine("Línea de la Vida", "800 911 2000", "gob.mx/conasama"),
    "NL": HelpLine("113 Zelfmoordpreventie", "113 or 0800 0113", "113.nl"),
    "NO": HelpLine("Mental Helse", "116 123", "mentalhelse.no"),
    "NZ": HelpLine("Need to talk?", "1737", "1737.org.nz"),
    "SE": HelpLine("Självmordslinjen", "90101", "mind.se"),
    "US": HelpLine("988 Suicide & Crisis Lifeline", "988", "988lifeline.org"),
    "ZA": HelpLine("SADAG Suicide Crisis Line", "0800 567 567", "sadag.org"),
}

_ANYWHERE = (
    "There are people who listen, free of charge, in most countries; findahelpline.com has their numbers."
)

_OF_CATEGORY: Mapping[str, str] = {
    "S11": (
        "I am sorry that it hurts this much. I cannot help with this, but you do not have to go through it"
        " alone, and talking to someone can help, even when it does not feel like it. {help_lines}"
        " If you may act on these thoughts now, please call your local emergency number, or go to someone"
        " who can stay with you. If you asked for someone else, the same people can tell you how to be there"
        " for them. {appeal}"
    ),
    "S3": (
        "{stopped} If something was done to you or to someone you know, it was not your fault, and a doctor,"
        " the police or a help line for victims can support you. {appeal}"
    ),
    "S4": (
        "{stopped} If a child is in danger, please tell the police now; what you have seen online can be"
        " reported through inhope.org. For anyone who is worried about thoughts, their own or someone"
        " else's, there is confidential help: stopitnow.org.uk, troubled-desire.com. {appeal}"
    ),
    "S6": (
        "{stopped} Someone who knows your situation can advise you: a doctor, a pharmacist, a lawyer or"
        " another professional. In an emergency, call your local emergency number. {appeal}"
    ),
    "S7": (
        "{stopped} If you are being followed or threatened, the police or a victims' help line can support"
        " you. {appeal}"
    ),
    "S10": (
        "{stopped} I can talk about the subject itself, its history, or how to answer such words. {appeal}"
    ),
    "JB": "{stopped} I cannot set aside the rules that I work under. {appeal}",
}
_GENERAL = "{stopped} {appeal}"


class Notices:
    """The messages of one installation. `country` is an ISO 3166 code; general text if it has no line.

    They say what was refused and what can be done. They accuse nobody: a check reads words, knows no
    intentions, and may be wrong.
    """

    def __init__(self, country: str, overrides: Mapping[str, str], contact: str = "") -> None:
        """`contact` is where people complain: an address or URL."""
        self._lines = _help_lines(country)
        self._overrides = overrides
        self._contact = contact or "whoever runs this server"

    def message(self, category: str | None, request_id: str = "") -> str:
        """The message for a blocked prompt or answer. `category` None: no category is certain."""
        text = self._overrides.get(category or "") or _OF_CATEGORY.get(category or "")
        if not text:
            text = self._overrides.get("default") or _GENERAL
        texts = {
            "{stopped}": _stopped(category),
            "{appeal}": self._appeal(request_id),
            HELP_LINES_MARK: self._lines,
            "{contact}": self._contact,
            "{request_id}": request_id,
        }
        for mark, value in texts.items():
            text = text.replace(mark, value)
        return text

    def _appeal(self, request_id: str) -> str:
        named = f" and name the request {request_id}" if request_id else ""
        return f"You can say it in other words. To have this looked at, contact {self._contact}{named}."


def _stopped(category: str | None) -> str:
    about = "" if category is None else f" ({BY_CODE[category].title})"
    return f"An automatic safety check{about} stopped this. It reads words, not intentions, and may be wrong."


def _help_lines(country: str) -> str:
    line = HELP_LINES.get(country.upper())
    return f"You can reach {line.name}: {line.number} ({line.site})." if line else _ANYWHERE
