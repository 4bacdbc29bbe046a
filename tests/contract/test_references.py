"""What docstrings and comments refer to is there: a module of app/, and a name that it defines."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("app", "scripts", "tests") for path in (ROOT / folder).rglob("*.py"))
DOTTED = re.compile(r"(?<![\w./])app(?:\.[a-z_][a-z_0-9]*)+(?:\.[A-Z]\w*)?")
PATHS = re.compile(r"(?<![\w./])(?:app|scripts|tests)/[\w/]+\.py\b")


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a module binds at its top level."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def exists(reference: str) -> bool:
    """Whether a dotted name is a module, a package, or a name in one."""
    parts = reference.split(".")
    for length in (len(parts), len(parts) - 1):
        place = ROOT.joinpath(*parts[:length])
        if place.is_dir() and length == len(parts):
            return True
        if place.with_suffix(".py").exists():
            return length == len(parts) or parts[-1] in defined(place.with_suffix(".py"))
    return False


def prose(source: str) -> str:
    """The docstrings and comments of a module."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    docstrings = [
        node.value for node in texts if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join(comments + docstrings)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_module_refers_to_exists(path: Path) -> None:
    """No reference outlives a move or a new name."""
    text = prose(path.read_text("utf-8"))
    assert {name for name in DOTTED.findall(text) if not exists(name)} == set()
    assert {name for name in PATHS.findall(text) if not (ROOT / name).exists()} == set()


PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")}
    - {*(ROOT / "docs/log").glob("*.md"), ROOT / "CHANGELOG.md"}
)
"""All but the records of what was: those may name modules that are gone."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_refers_to_exists(path: Path) -> None:
    """A page names no module that has moved."""
    assert {name for name in PATHS.findall(path.read_text("utf-8")) if not (ROOT / name).exists()} == set()
