"""`tokenring chat`: ask a running server from the terminal. Nothing is written on this machine."""

from __future__ import annotations

import argparse
import io
import json
import os
import stat
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.cli import tables
from app.cli.chat import conversation
from app.cli.chat.screen import Screen, usage_line
from app.cli.chat.session import Session, model_names
from app.cli.chat.turn import Outcome, Turn, ask, image_part, user_message
from app.cli.client_options import Server, add_options
from app.cli.flags import Commands, command, flag
from app.errors import BadRequest

EXIT_OK = 0
EXIT_INCOMPLETE = 1
EXIT_INTERRUPTED = 130


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `chat` to the parser of the command line."""
    chat = command(
        commands, "chat", "chat with a running server; answers resume after any interruption", _run
    )
    question = "a question, answered once; text on standard input goes below it (default: a dialogue)"
    flag(chat, "question", question, metavar="QUESTION", nargs="?")
    add_options(chat)
    where = chat.add_mutually_exclusive_group()
    flag(where, "--conversation", "continue this conversation", metavar="ID")
    flag(where, "--continue", "continue the newest conversation", bool, dest="is_continued")
    flag(where, "--list", "list the newest conversations", bool, dest="is_list")
    flag(chat, "--model", "model that answers (default: the server's first)", metavar="NAME")
    flag(chat, "--system", "system message of a new conversation", metavar="TEXT")
    flag(chat, "--max-tokens", "longest answer, in tokens", int, "N")
    flag(chat, "--temperature", "0: always the likeliest token; higher: more variety", float, "X")
    flag(
        chat, "--image", "image for the question; may be repeated", Path, "FILE", action="append", default=[]
    )
    flag(chat, "--no-store", "keep no conversation on the server; needs a question", bool)
    flag(chat, "--json", "print one JSON object, once the answer has ended; needs a question", bool)


def _run(args: argparse.Namespace) -> int:
    """Run the command. Raises SettingsError, Unreachable, Refused, BadRequest."""
    server = Server.of(args)
    if args.is_list:
        return _list(server, as_json=args.json)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may have what the locale lacks
    question = _question(args.question)
    is_at_terminal = sys.stdin is not None and sys.stdin.isatty()
    if question is None and (args.json or args.no_store or not is_at_terminal):
        raise BadRequest(
            "There is no question. Give one as an argument or on standard input; a dialogue needs a terminal,"
            " and neither --json nor --no-store."
        )
    if question is not None and not question.strip() and not args.image:
        raise BadRequest("The question is empty; write one between the quotation marks.")
    conversation_id = args.conversation
    if args.is_continued and (conversation_id := conversation.newest_id(server)) is None:
        raise BadRequest("There is no conversation to continue yet.")
    if args.system and conversation_id:
        raise BadRequest("--system begins a conversation; this one has begun without it.")
    options = {"model": args.model or _first_model(server)}
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    options |= {name: value for name, value in sampling.items() if value is not None}
    images = [image_part(path) for path in args.image]
    if question is not None:
        return _answer(args, server, options, Turn(_messages(args.system, question, images), conversation_id))
    session = Session(server, options, system=args.system, images=images)
    if conversation_id:
        session.open(conversation_id)
    session.run()
    return EXIT_OK


def _messages(system: str | None, question: str, images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, user_message(question, images)]


def _question(text: str | None) -> str | None:
    """The question of the command line, and below it what a pipe or a file on standard input holds."""
    if text is not None:
        text = os.fsencode(text).decode(errors="replace")  # UTF-8 also where the locale is another
    if sys.stdin is None or stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode):  # a terminal, or /dev/null
        return text
    try:
        piped = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError:
        raise BadRequest("Standard input is not UTF-8 text; --image sends an image.") from None
    return "\n\n".join(filter(None, (text, piped))) or None


def _first_model(server: Server) -> str:
    names = model_names(server)
    if not names:
        raise BadRequest("Your key may use no model of this server; its operator can change that.")
    return names[0]


def _answer(args: argparse.Namespace, server: Server, options: dict[str, Any], turn: Turn) -> int:
    """Answer once."""
    screen = None if args.json else Screen()
    body = turn.body(options | ({"store": False} if args.no_store else {}))
    outcome = ask(server, screen, body)
    if screen is None:
        print(json.dumps(_as_json(outcome)))
    else:
        for note in outcome.notes:
            screen.notice(note)
        if sys.stdout.isatty():
            screen.notice(usage_line(outcome.answer, outcome.elapsed_s))
    if outcome.is_stopped:
        return EXIT_INTERRUPTED
    return EXIT_OK if outcome.answer.is_whole else EXIT_INCOMPLETE


def _as_json(outcome: Outcome) -> dict[str, Any]:
    answer = outcome.answer
    return {
        "object": "chat.answer",
        "id": answer.id,
        "conversation_id": answer.conversation_id,
        "message_id": answer.message_id,
        "model": answer.model,
        "content": answer.content,
        "reasoning_content": answer.reasoning or None,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "moderation": answer.moderation,
        "error": answer.error,
        "notes": list(outcome.notes),
        "reconnects": answer.reconnects,
    }


def _list(server: Server, *, as_json: bool) -> int:
    page = conversation.listed(server)
    if as_json:
        print(json.dumps(page))
        return EXIT_OK
    rows = [
        (
            each["id"],
            each["title"] or "",
            each["model"] or "",
            f"{datetime.fromtimestamp(each['updated_at'], UTC):%Y-%m-%d %H:%M}",
            f"{each['total_tokens']:,}",
        )
        for each in page["data"]
    ]
    print(tables.text(("id", "title", "model", "last turn (UTC)", "tokens"), rows, left=4))
    return EXIT_OK
