"""Export and import in a browser: what was exported comes back equal, what cannot be read is named."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, FilePayload, Page, expect

from tests.support.console import ConsoleServer, module_of, open_signed_in

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TREE = [
    {"role": "system", "content": "Be brief.", "id": "s", "parent_id": None},
    {"role": "user", "content": "مرحبا <b>", "id": "a", "parent_id": "s", "created_at": 1_700_000_000},
    {"role": "assistant", "content": "1", "id": "b", "parent_id": "a", "reasoning_content": "hm"},
    {"role": "assistant", "content": "eins\n\n😀", "id": "c", "parent_id": "a", "status": "cancelled"},
    {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE], "id": "d", "parent_id": "b"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "id": "e", "parent_id": "d"},
    {"role": "tool", "content": "42", "tool_call_id": "c1", "id": "f", "parent_id": "e"},
    {"role": "assistant", "content": "", "id": "g", "parent_id": "f", "finish_reason": "stop"},
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "x"}], "name": "Ada", "parent_id": None},
]
LLAMA = [
    {"id": "r", "type": "root", "role": "system", "content": "", "parent": None, "timestamp": 1},
    {"id": "2", "role": "assistant", "content": "new", "parent": "1", "timestamp": 3000, "model": "m.gguf"},
    {"id": "3", "role": "assistant", "content": "old", "parent": "1", "timestamp": 2000, "thinking": "so"},
    {
        "id": "1",
        "role": "user",
        "content": "ask",
        "parent": "r",
        "timestamp": 1000,
        "extra": [{"type": "TEXT", "name": "a.txt", "content": "words"}],
    },
]
"""As llama.cpp's console has it: in no order, below a root, with files beside the text."""
SESSION = {"id": "x", "name": "From elsewhere", "currNode": "3", "lastModified": 5}
LINES = [{"type": "session", "harness": "other", **SESSION}] + [
    {"type": "message", "message": m} for m in LLAMA
]


@pytest.fixture(scope="module")
def server_flags() -> tuple[str, ...]:
    """Conversations are read and made quickly."""
    return ("--max-reads-per-s", "0")


@dataclass
class Ann:
    """Somebody with conversations of their own."""

    server: ConsoleServer
    key: str

    def kept(self) -> list[Any]:
        """Of each conversation its title and what an import keeps of its messages, newest first."""
        listed = self.server.call("GET", "/api/conversations", key=self.key)["data"]
        shown = [self.server.call("GET", f"/api/conversations/{c['id']}", key=self.key) for c in listed]
        return [(conversation["title"], tree(conversation["messages"])) for conversation in shown]

    def put(self, *messages: dict[str, Any], title: str = "A tree") -> None:
        """Make a conversation."""
        self.server.call("POST", "/api/conversations", {"title": title, "messages": [*messages]}, self.key)


@pytest.fixture
def ann(server: ConsoleServer, request: pytest.FixtureRequest) -> Ann:
    """Another one in each test."""
    return Ann(server, server.new_key("ann", owner=request.node.name))


@pytest.fixture
def page(context: BrowserContext, server: ConsoleServer, ann: Ann) -> Page:
    """Ann's page of the console."""
    opened = context.new_page()
    open_signed_in(opened, server.url, ann.key)
    return opened


def tree(messages: list[dict[str, Any]]) -> list[Any]:
    """The messages without ids, and the index of each one's parent."""
    places = {m["id"]: i for i, m in enumerate(messages)}
    names = {"id", "parent_id", "usage", "request_id", "choice"}
    return [({k: v for k, v in m.items() if k not in names}, places.get(m["parent_id"])) for m in messages]


def export(page: Page, name: str, button: str = "Import and export") -> tuple[str, bytes]:
    """A file's name and content, as the browser saves it."""
    page.get_by_role("button", name=button).click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name=name).click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def import_files(page: Page, *files: bytes, names: tuple[str, ...] = ()) -> None:
    """Import files as a user does."""
    payloads: list[FilePayload] = [
        {"name": name, "mimeType": "", "buffer": content}
        for name, content in zip(names or ("file.jsonl",) * len(files), files, strict=True)
    ]
    page.get_by_role("button", name="Import and export").click()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("menuitem", name="Import…").click()
    chooser.value.set_files(payloads)


def jsonl(*values: Any) -> bytes:
    """Values as lines."""
    return "\n".join(json.dumps(value, ensure_ascii=False) for value in values).encode()


def test_what_was_exported_comes_back_equal(page: Page, ann: Ann):
    """Of one conversation: its messages, branches, reasoning, calls, images, times and states."""
    ann.put(*TREE)
    page.reload()
    page.get_by_role("link", name="A tree").hover()
    name, content = export(page, "Export as JSONL", "Actions for A tree")
    assert name == "A-tree.jsonl"
    lines = [json.loads(line) for line in content.decode().splitlines()]
    assert [line["type"] for line in lines] == ["session", *["message"] * (len(TREE) + 1)]
    assert (lines[0]["name"], lines[1]["message"]["type"]) == ("A tree", "root")
    assert len(lines[1]["message"]["children"]) == 2
    import_files(page, content)
    expect(page.get_by_text("Imported 1 conversation.")).to_be_visible()
    again, first = ann.kept()
    assert again == first
    assert len(first[1]) == len(TREE)


def test_all_conversations_are_one_file(page: Page, ann: Ann):
    """Which llama.cpp reads too, and this console; and one of Markdown."""
    for number in range(3):
        ann.put({"role": "user", "content": f"question {number}"}, title=f"№ {number}")
    name, content = export(page, "Export all as JSONL")
    assert name.startswith("conversations-20")
    before = ann.kept()
    import_files(page, content)
    expect(page.get_by_text("Imported 3 conversations.")).to_be_visible()
    assert sorted(ann.kept(), key=str) == sorted(before * 2, key=str)
    _, markdown = export(page, "Export all as Markdown")
    assert markdown.decode().count("# № ") == 6


@pytest.mark.parametrize("form", ["lines", "legacy", "zip"])
def test_conversations_of_llama_cpp_are_read(page: Page, ann: Ann, form: str):
    """Its lines, its older JSON and its archives: oldest first, the open branch last, files as text."""
    content, names = jsonl(*LINES), ("a.jsonl",)
    if form == "legacy":
        content, names = json.dumps([{"conv": SESSION, "messages": LLAMA}]).encode(), ("a.json",)
    if form == "zip":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jsonl", content)
            archive.writestr("read.me", "no conversation")
        content, names = packed.getvalue(), ("a.zip",)
    import_files(page, content, names=names)
    expect(page.get_by_role("link", name="From elsewhere")).to_be_visible()
    [(title, messages)] = ann.kept()
    assert title == "From elsewhere"
    shown = [(m["role"], m["content"], m["created_at"], above) for m, above in messages]
    assert shown == [
        ("user", "ask\n\n--- File: a.txt ---\nwords", 1, None),
        ("assistant", "new", 3, 0),
        ("assistant", "old", 2, 0),
    ]
    assert messages[2][0]["reasoning_content"] == "so"


GOOD = {"type": "message", "message": {"id": "1", "role": "user", "content": "x"}}
BROKEN = [
    (b"", "file.jsonl is empty."),
    (b"\xff\xfe\x00", "file.jsonl is not UTF-8 text."),
    (b"hello", "file.jsonl is not JSON"),
    (b"[]", "file.jsonl has no conversation in it."),
    (b"7", "file.jsonl is no conversation"),
    (b'{"messages": "x"}', "file.jsonl is no conversation"),
    (b"PK\x03\x04 broken", "file.jsonl: it is a damaged archive."),
    (jsonl(GOOD), "file.jsonl, line 1 is a message before any session."),
    (jsonl(LINES[0], GOOD) + b"\n{broken", "file.jsonl, line 3 is not JSON"),
    (jsonl(LINES[0], {"type": "message", "message": None}), "file.jsonl, line 2 has no message in it."),
    (jsonl(LINES[0]), "file.jsonl, line 1 has no message in it."),
    (
        jsonl(
            LINES[0],
            {"type": "message", "message": {"id": "1", "role": "user", "content": "x", "parent": "2"}},
            {"type": "message", "message": {"id": "2", "role": "user", "content": "y", "parent": "1"}},
        ),
        "file.jsonl, line 1: its messages stand in a circle.",
    ),
]
"""A file, and the beginning of what is said of it."""


def test_a_broken_file_is_named_with_its_line(page: Page):
    """Nothing of it is imported; markup in it is text."""
    parse = """async (module, files) => {
        const said = [];
        for (const bytes of files) {
            const parsed = module.parseFile(new Uint8Array(bytes).buffer, "file.jsonl");
            said.push(await parsed.then(() => "read", (error) => error.message));
        }
        return said;
    }"""
    said = module_of(page, "js/lists/formats.js", parse, [list(content) for content, _ in BROKEN])
    for sentence, (_, expected) in zip(said, BROKEN, strict=True):
        assert sentence.startswith(expected)


def test_files_of_other_kinds_are_refused_with_those_that_can_be_read(page: Page):
    """Whatever is in them; what they say is no place in them."""
    import_files(page, b"# A title", b"\x89PNG\r\n", names=("notes.md", "picture.png"))
    advice = "cannot be imported; export it as JSONL. Readable are JSONL, JSON and ZIP."
    expect(page.get_by_role("alert")).to_contain_text(f"notes.md {advice}")


def test_what_the_server_refuses_is_named_with_its_line(page: Page, ann: Ann, faults: Any):
    """Of several conversations the ones before are kept, and the message says so."""
    faults.allow("400 (Bad Request)")
    hostile = {"type": "message", "message": {"id": "9", "role": "<img src=x>", "content": "x"}}
    import_files(page, jsonl(*LINES, LINES[0], GOOD, hostile))
    notice = page.get_by_role("alert")
    expect(notice).to_contain_text("file.jsonl, line 8: messages[1].role must be one of")
    expect(notice).to_contain_text("Before that, 1 were imported.")
    assert page.locator(".notices img").count() == 0
    assert len(ann.kept()) == 1


def test_our_own_json_is_read(page: Page, ann: Ann):
    """As `GET …/export` gives it, with usage and ids in it."""
    export_ = {
        "id": "conv_1",
        "title": "Ours",
        "model": "m",
        "total_tokens": 3,
        "created_at": 1,
        "updated_at": 1,
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    answer = {"id": "b", "parent_id": "a", "role": "assistant", "content": "hi", "created_at": 5}
    messages = [
        {
            "id": "a",
            "parent_id": None,
            "role": "user",
            "content": "hello",
            "created_at": 5,
            "status": "complete",
        },
        {**answer, "usage": usage, "request_id": "chatcmpl-1", "choice": 0, "finish_reason": "stop"},
    ]
    import_files(page, json.dumps({**export_, "messages": messages}).encode(), names=("ours.json",))
    expect(page.get_by_role("link", name="Ours")).to_be_visible()
    [(_, shown)] = ann.kept()
    assert [(m["content"], m["created_at"], above) for m, above in shown] == [
        ("hello", 5, None),
        ("hi", 5, 0),
    ]


def test_a_long_conversation_is_carried_over(page: Page):
    """Ten thousand messages, there and back."""
    chain = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"line {i}"} for i in range(10_000)]
    carry = """async (formats, messages) => {
        const above = (i) => (i ? `m${i - 1}` : null);
        const times = { created_at: 1, updated_at: 1 };
        const chain = messages.map((m, i) => ({ ...m, ...times, id: `m${i}`, parent_id: above(i) }));
        const shown = { id: "c", title: "long", model: "m", ...times, messages: chain };
        const [{ body }] = formats.parseText(formats.toJsonl(shown), "f");
        const isSame = (m, i) => m.content === messages[i].content && m.parent_id === above(i);
        return [body.messages.length, body.messages.every(isSame)];
    }"""
    assert module_of(page, "js/lists/formats.js", carry, chain) == [10_000, True]
