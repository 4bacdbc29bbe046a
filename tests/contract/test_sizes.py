"""Files and functions stay short enough to be read at once: one idea a file, one step of it a function.

The cap on files is a last resort, of 600 lines: one of 400 had begun to cut by size what is one idea.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60
SOURCES = [path for folder in ("app", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_is_too_long():
    """A longer one holds a second subject."""
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_too_long():
    """Signature and docstring included."""
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert too_long == []


def test_the_top_of_app_holds_ten_modules_at_most():
    """Everything else has a room."""
    modules = {path.name for path in (ROOT / "app").glob("*.py")} - {"__init__.py"}
    assert len(modules) <= 10
