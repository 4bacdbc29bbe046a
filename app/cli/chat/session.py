"""The interactive chat: a line is a question, or a command that begins with a slash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.cli import tables
from app.cli.chat import conversation
from app.cli.chat.conversation import ROOT, Message, text_of
from app.cli.chat.screen import Screen, usage_line
from app.cli.chat.turn import Turn, ask, image_part, user_message
from app.cli.client_options import Refused, Server, Unreachable, Unreadable
from app.cli.terminal import printable
from app.errors import BadRequest

try:
    import readline
except ImportError:  # a Python built without it: lines can still be read
    readline = None  # type: ignore[assignment]

FENCE = '"""'
_PROMPT = "> "
_HELP = (
    ("/help", "show this list"),
    ("/new", "begin a new conversation"),
    ("/model [NAME]", "use another model from the next question on; without a name, list them"),
    ("/image FILE", "send an image with the next question"),
    ("/retry", "get another answer to the last question"),
    ("/edit", "change the last question and ask it again"),
    ("/undo", "go back to before the last question; nothing is deleted"),
    ("/stop", "stop an answer of this conversation that another client waits for"),
    ("/history", "show the conversation"),
    ("/quit", "leave, as Ctrl-D does"),
    (FENCE, "begin and end a text of several lines, each time on a line of its own"),
    ("Ctrl-C", "stop the answer; pressed again, leave"),
)


class Session:
    """A chat at a terminal: the conversation that is open, and where its next turn goes."""

    def __init__(
        self,
        server: Server,
        options: dict[str, Any],
        *,
        system: str | None = None,
        images: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._server = server
        self._options = options
        self._system = system
        self._screen = Screen()
        self._may_leave = False
        """Whether the next Ctrl-C leaves: the first stopped an answer, or dropped a line."""
        self._conversation_id: str | None = None
        self._parent_id: str | None = None
        """The answer below which the next turn goes; None: the newest, as the server sees it."""
        self._last_turn: Turn | None = None
        """A turn that the server has not taken."""
        self._images = list(images)
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/new": self._new,
            "/model": self._model,
            "/image": self._image,
            "/retry": self._retry,
            "/edit": self._edit,
            "/undo": self._undo,
            "/stop": self._stop,
            "/history": self._history,
            "/help": self._help,
        }

    # --- the loop

    def run(self) -> None:
        """Read questions until the user leaves."""
        self._say(f"{self._server.url}, model {self._options['model']}. /help lists what you can do.")
        while True:
            try:
                line = _read(_PROMPT)
                self._may_leave = False
                if line in ("/quit", "/exit"):
                    return
                self._take(line)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if self._may_leave:
                    return
                self._may_leave = True
                self._say("Ctrl-C again leaves.")
            except (Refused, Unreachable, Unreadable, BadRequest) as exc:
                is_busy = isinstance(exc, Refused) and exc.code == "conversation_busy"
                self._say(f"{exc}{' /stop ends it.' if is_busy else ''}")

    def open(self, conversation_id: str) -> None:
        """Open a conversation and show its last turn, whose answer may still be arriving."""
        line = self._branch(conversation_id)
        self._conversation_id = conversation_id
        if readline is not None:
            for message in line:
                if message["role"] == "user":
                    readline.add_history(_typed(text_of(message)))
        running = line.pop() if line and line[-1]["status"] == "in_progress" else None
        question = conversation.last_question(line)
        self._print(line[line.index(question) :] if question else line[-1:])
        if running is not None:
            self._show(None, running["request_id"])

    def _question(self, text: str) -> None:
        """Ask a question below the last answer."""
        messages = [user_message(text, self._images)]
        if self._system and self._conversation_id is None:
            messages.insert(0, {"role": "system", "content": self._system})
        self._ask(Turn(messages, self._conversation_id, self._parent_id))

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            if name not in self._commands:
                raise BadRequest(
                    f"There is no command {name}; /help lists them. A space before it makes it text."
                )
            self._commands[name](rest.strip())
        elif line.strip():
            self._question(line.strip())

    def _ask(self, turn: Turn) -> None:
        self._last_turn = turn
        self._show(turn.body(self._options))

    def _show(self, body: Mapping[str, Any] | None, answer_id: str = "") -> None:
        """Show an answer, say how it ended, and remember where the next turn goes."""
        self._may_leave = True
        outcome = ask(self._server, self._screen, body, answer_id)
        self._may_leave = outcome.is_stopped
        answer = outcome.answer
        self._images = []
        self._last_turn = None
        self._conversation_id = answer.conversation_id or self._conversation_id
        if answer.content:
            self._parent_id = answer.message_id or self._parent_id
        for note in outcome.notes:
            self._say(note)
        self._say(usage_line(answer, outcome.elapsed_s))

    # --- commands

    def _new(self, _rest: str) -> None:
        self._conversation_id = self._parent_id = self._last_turn = None
        self._images = []
        self._say("A new conversation begins with your next question.")

    def _model(self, name: str) -> None:
        models = model_names(self._server)
        if name in models or (name == "auto" and len(models) > 1):
            self._options["model"] = name
        elif name:
            raise BadRequest(f"There is no model {name!r}. There are: {', '.join(models)}.")
        self._say(f"Model: {self._options['model']}. There are: {', '.join(models)}.")

    def _image(self, name: str) -> None:
        self._images.append(image_part(Path(name)))
        self._say(f"Sent with your next question: {len(self._images)} image(s).")

    def _retry(self, _rest: str) -> None:
        if self._last_turn is not None:
            self._ask(self._last_turn)
            return
        question = self._last_question()
        self._ask(Turn([], self._conversation_id, question["id"]))

    def _edit(self, _rest: str) -> None:
        question = self._last_question()
        text, images = conversation.split(question)
        if not (text := _read(_PROMPT, text).strip()):
            return
        self._ask(Turn([user_message(text, images)], self._conversation_id, question["parent_id"] or ROOT))

    def _undo(self, _rest: str) -> None:
        question = self._last_question()
        self._parent_id = question["parent_id"] or ROOT
        line = [] if self._parent_id == ROOT else self._branch(self._conversation_id or "")
        self._print(line[-1:])
        self._say("Your next question goes here." if line else "Your next question is the first.")

    def _stop(self, _rest: str) -> None:
        if self._conversation_id is None:
            raise BadRequest("There is no conversation yet.")
        messages = conversation.messages_of(self._server, self._conversation_id)
        running = [message["request_id"] for message in messages if message["status"] == "in_progress"]
        for answer_id in running:
            self._server.call("POST", f"/api/chat/completions/{answer_id}/cancel")
        self._say(f"{len(running)} answer(s) stopped.")

    def _history(self, _rest: str) -> None:
        if self._conversation_id is None:
            raise BadRequest("There is no conversation yet.")
        self._print(self._branch(self._conversation_id))

    def _help(self, _rest: str) -> None:
        print(tables.text(("type", "to"), _HELP))

    # --- the conversation

    def _branch(self, conversation_id: str) -> list[Message]:
        messages = conversation.messages_of(self._server, conversation_id)
        return conversation.branch(messages, self._parent_id)

    def _last_question(self) -> Message:
        """The last question of the branch. Raises BadRequest."""
        if self._conversation_id is not None and self._parent_id != ROOT:
            question = conversation.last_question(self._branch(self._conversation_id))
            if question is not None:
                return question
        raise BadRequest("There is no question yet.")

    def _print(self, line: Sequence[Message]) -> None:
        for message in line:
            text = printable(text_of(message)).rstrip("\n")
            print(f"{_PROMPT}{text}" if message["role"] == "user" else text)

    def _say(self, text: str) -> None:
        self._screen.notice(text)


def model_names(server: Server) -> list[str]:
    """The models that the key may use. Raises Unreachable, Refused."""
    return [model["id"] for model in server.call("GET", "/api/models")["data"]]


def _typed(text: str) -> str:
    """The text as readline takes it: a C string, without NUL."""
    return text.replace("\0", "")


def _read(prompt: str, text: str = "") -> str:
    """A line, or what stands between two fences; `text` is there to be changed. Raises EOFError."""
    if readline is not None:
        readline.set_startup_hook(lambda: readline.insert_text(_typed(text)))
    try:
        line = input(prompt)
    finally:
        if readline is not None:
            readline.set_startup_hook(None)
    if line.strip() != FENCE:
        return line
    lines = []
    while (line := input("")).strip() != FENCE:
        lines.append(line)
    return "\n".join(lines)
