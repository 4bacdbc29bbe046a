"""Who sets what: an object's attributes are its own to change, and names say what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALLOWED: Mapping[str, str] = {
    "app/__main__.py": "standard streams that were closed",
    "app/admission/budget.py": "the nodes of its own prefix tree",
    "app/admission/queue.py": "the levels of its own queue",
    "app/api/app.py": "Starlette's router has no argument for redirects",
    "app/api/http/protocol.py": "uvicorn's cycle learns from its protocol that the client has left",
    "app/api/server.py": "uvicorn is stopped by a flag",
    "app/engine/grammar/walk.py": "xgrammar's conversion of an old structural tag loses a field",
    "app/engine/sglang/constraints.py": "SGLang's request and its tools, copies of ours",
    "app/engine/sglang/patches/continued_requests.py": "SGLang's method, and a request to continue",
    "app/engine/sglang/patches/cpu_platform.py": "SGLang's padding of heads is replaced",
    "app/engine/sglang/patches/detokenizer.py": "SGLang's batch, on its way to this process",
    "app/engine/sglang/patches/grammar_guard.py": "SGLang's methods, and a meter beside its grammar",
    "app/engine/sglang/patches/handover.py": "SGLang's request, a copy of ours; choices, once per token",
    "app/engine/sglang/launch.py": "SGLang takes the controller's entry from a module's attribute",
    "app/engine/sglang/patches/dead_ends.py": "SGLang's methods are replaced",
    "app/engine/sglang/patches/logit_bias.py": "SGLang's method is replaced",
    "app/engine/sglang/patches/penalties.py": "SGLang's methods are replaced",
    "app/engine/sglang/patches/stop_strings.py": "SGLang's methods are replaced",
    "app/engine/sglang/remote.py": "SGLang's chat takes these arguments from a running server only",
    "app/engine/sglang/render.py": "SGLang's request and its chat, copies of ours",
    "app/log.py": "the standard library's record",
    "app/safety/classifiers/encoder.py": "ONNX Runtime's options are attributes",
}
"""Modules that set attributes of objects of other libraries, or within a data structure of theirs."""

SAYS_NOTHING = {"one", "most", "part", "told", "said", "found", "known", "given", "before", "its"}


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that a statement assigns to or deletes."""
    match node:
        case ast.Assign(targets=several) | ast.Delete(targets=several):
            left = list(several)
        case ast.AugAssign(target=single) | ast.AnnAssign(target=single) | ast.For(target=single):
            left = [single]
        case ast.withitem(optional_vars=ast.expr() as single):
            left = [single]
        case ast.Call(func=ast.Name(id="setattr"), args=[value, *_]):
            left = [ast.Attribute(value, "", lineno=node.lineno)]
        case _:
            left = []
    while left:
        match left.pop():
            case ast.Tuple(elts=inner) | ast.List(elts=inner):
                left.extend(inner)
            case ast.Starred(value=value):
                left.append(value)
            case target:
                yield target


def set_from_outside(source: str) -> list[int]:
    """The lines on which an attribute of something other than `self` or `cls` is set."""
    return [
        target.lineno
        for node in ast.walk(ast.parse(source))
        for target in targets(node)
        if isinstance(target, ast.Attribute)
        and not (isinstance(target.value, ast.Name) and target.value.id in ("self", "cls"))
    ]


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Every name that the source defines or uses, and its line."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def modules(*folders: str) -> list[Path]:
    """The Python files in folders of the repository."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("self.a = 1", []),
        ("self.b.a = 1", [1]),
        ("x, y.a = 1, 2\ny.b += 1\ndel y.c", [1, 2, 3]),
        ("setattr(x, name, 1)", [1]),
        ("with f() as y.a: pass\nfor y.a in z: pass", [1, 2]),
    ],
)
def test_an_assignment_to_another_objects_attribute_is_recognised(source: str, lines: list[int]) -> None:
    """In whichever statement it stands; an object may set its own."""
    assert sorted(set_from_outside(source)) == lines


def test_no_object_sets_an_attribute_of_another() -> None:
    """What an object holds comes by its constructor or by one of its methods."""
    setting = {str(path.relative_to(ROOT)) for path in modules("app") if set_from_outside(path.read_text())}
    assert setting <= ALLOWED.keys(), "give the object a method, or a constructor's argument"
    assert setting == ALLOWED.keys(), "an exception that nothing needs"


def test_names_say_what_they_hold() -> None:
    """No variable, argument, function or attribute has a name that fits everything."""
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules("app", "scripts")
        for line, name in names_in(path.read_text())
        if name in SAYS_NOTHING
    ]
    assert vague == []
