"""What reaches the log, and what never does."""

import json
import subprocess
import sys

from app.log import safe_traceback

SECRET = "the words of a prompt"  # not a password


def logged(code: str) -> dict[str, str]:
    """The one line that `code` logs in a process of its own."""
    script = f"import logging\nfrom app.log import configure\nconfigure('info', 'json')\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    return json.loads(line)


def test_library_warning_has_its_text():
    """A library that knows no prompts may say what it has to say."""
    assert (
        logged("logging.getLogger('uvicorn.error').warning('port %s is odd', 1)")["event"] == "port 1 is odd"
    )


def test_sglang_says_where_but_not_what():
    """SGLang's parsers quote answers: of their records only the place is logged."""
    line = logged(f"logging.getLogger('sglang.srt.function_call').warning('Parsed %s', {SECRET!r})")
    assert line["level"] == "warning"
    assert SECRET not in json.dumps(line)


def test_exceptions_of_libraries_lose_their_message():
    """An exception's message may quote a prompt: its type and place are logged."""
    code = f"try:\n    int({SECRET!r})\nexcept ValueError:\n    logging.getLogger('x').exception('it broke')"
    line = logged(code)
    assert line["error"].startswith("ValueError at <string>:")
    assert SECRET not in json.dumps(line)


def test_where_names_type_and_code():
    """`where` gives an exception's type and code positions, never its message."""
    try:
        int(SECRET)
    except ValueError as exc:
        told = safe_traceback(exc)
    assert told.startswith("ValueError at test_log.py:")
    assert SECRET not in told
