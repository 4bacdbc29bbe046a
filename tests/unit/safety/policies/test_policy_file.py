"""The policy file: what it may say, what it leaves out, and what it may not loosen."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from app.safety.categories import CATEGORIES, CODE_OF, LOCKED
from app.safety.policies.policy_file import PolicyError, PolicyFile, Rule, parse, read
from app.safety.policies.policy_prompt import NORMAL, STRICT, VERSION


def of(text: str) -> PolicyFile:
    """The policy of a file with this text."""
    return parse(tomllib.loads(text))


def test_without_a_file_it_is_the_built_in_policy():
    """Every category blocks, at the built-in rates; so does an empty file."""
    assert read(None) == of("") == PolicyFile()
    assert read(None).rules == dict.fromkeys(CATEGORIES, Rule())


def test_a_general_word_holds_for_every_category_without_its_own():
    """What stands at the top is the default; a category's table changes what it names, by name or code."""
    rules = of(
        'action = "watch"\nblock_fpr = 0.003\n[categories.privacy]\naction = "flag"'
        "\n[categories.S2]\nwatch_fpr = 0.1"
    ).rules
    assert rules["S1"] == Rule("watch", 0.003)
    assert rules["S7"] == Rule("flag", 0.003)
    assert rules["S2"] == Rule("watch", 0.003, 0.1)


@pytest.mark.parametrize("category", sorted(LOCKED))
@pytest.mark.parametrize(
    "line",
    ['action = "off"', 'action = "flag"', 'action = "watch"', "block_fpr = 0.001", "answer_fpr = 0.001"],
)
def test_child_exploitation_cannot_be_loosened(category, line):
    """Neither another action nor a lower rate is taken for it; the error says which category it is."""
    with pytest.raises(PolicyError, match=f"categories.{category}: .* cannot be loosened"):
        of(f"[categories.{category}]\n{line}")


def test_a_general_word_does_not_loosen_it_either():
    """It stays as it is built in, where the default is looser, and follows it where it is stricter."""
    loose = of(
        'action = "off"\nblock_fpr = 0.001\nwatch_fpr = 0.001\nanswer_fpr = 0.001\nwatched_answer_fpr = 0.001'
    )
    assert loose.rules["S4"] == Rule()
    assert loose.rules["S1"].action == loose.rules["S9"].action == "off"
    tight = of("block_fpr = 0.02\n[categories.S4]\nwatch_fpr = 0.1")
    assert tight.rules["S4"] == Rule("block", 0.02, 0.1)
    assert tight.rules["S9"] == Rule("block", 0.02)


def test_a_strict_key_blocks_what_would_be_watched():
    """It blocks from the watch threshold on, whatever the action; what is off stays off."""
    assert Rule().tightened() == Rule("block", 0.05, 0.1, 0.02, 0.02)
    assert Rule("flag").tightened() == Rule("watch").tightened() == Rule().tightened()
    assert Rule("off").tightened().action == "off"
    assert Rule(watch_fpr=0.1).tightened().watch_fpr == 0.1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("fail_open = true", "fail_open"),
        ('action = "stop"', "action"),
        ("block_fpr = 0.2", "block_fpr"),
        ("block_fpr = 0", "block_fpr"),
        ("block_fpr = true", "block_fpr"),
        ("block_fpr = nan", "block_fpr"),
        ('block_fpr = "1%"', "block_fpr"),
        ("watch_fpr = 0.001", "watch_fpr >= block_fpr"),
        ("watched_answer_fpr = 0.001", "watched_answer_fpr >= answer_fpr"),
        ("categories = 1", "categories"),
        ("[categories]\nS1 = 1", "categories.S1"),
        ("[categories.S14]", "categories.S14"),
        ("[categories.hate]\nwatch = 1", "categories.hate"),
        ("[categories.hate]\nwatch_fpr = 1", "categories.hate.watch_fpr"),
        ("[alignment]\nprompt = 1", "alignment"),
        ('[alignment]\nmode = "sometimes"', "alignment.mode"),
        ('[alignment]\nnormal = "Be kind."', "alignment.version"),
        ('[alignment]\nversion = "1"\nstrict = " "', "alignment.strict"),
        ('[messages]\nS99 = "no"', "messages.S99"),
        ("[messages]\nhate = 5", "messages.hate"),
        ('hard_list = "one"', "hard_list"),
        ("hard_list = [1]", "hard_list"),
        ('hard_list = ["\\u200b"]', "hard_list"),
    ],
)
def test_what_is_wrong_is_named(text, names):
    """An unknown or malformed entry is an error that says where it stands."""
    with pytest.raises(PolicyError, match=names):
        of(text)


def test_all_that_is_wrong_is_named_at_once():
    """Each problem has a line with its place, what is there, and what is allowed."""
    with pytest.raises(PolicyError) as refused:
        of('action = "stop"\nblock_fpr = 0.2\n[categories.S14]\n[categories.hate]\nwach_fpr = 0.1')
    assert str(refused.value).splitlines() == [
        "4 problems",
        "  action: expected 'block', 'watch', 'flag' or 'off', got 'stop'",
        "  block_fpr: must be 0.0001 to 0.1, got 0.2",
        f"  categories.S14: no such category; there are {', '.join(CODE_OF)}",
        (
            "  categories.hate: unknown key 'wach_fpr' (did you mean 'watch_fpr'?); there are action,"
            " block_fpr, watch_fpr, answer_fpr, watched_answer_fpr"
        ),
    ]


def test_what_two_rates_contradict_is_named_for_each_category():
    """Rates are compared once all tables are read, and each category's contradiction is listed."""
    with pytest.raises(PolicyError) as refused:
        of("[categories.hate]\nwatch_fpr = 0.001\n[categories.privacy]\nwatched_answer_fpr = 0.001")
    assert [line.split(":")[0].strip() for line in str(refused.value).splitlines()] == [
        "2 problems",
        "categories.hate",
        "categories.privacy",
    ]


def test_an_error_does_not_repeat_a_text_of_the_policy():
    """Spans of the hard list are secret, and an error goes to the log: it has the entry's number only."""
    with pytest.raises(PolicyError, match="entry 2") as refused:
        of(f'hard_list = ["ok", "{"project-x" * 3_000}"]\n[alignment]\nstrict = 5')
    assert "project-x" not in str(refused.value)


def test_a_file_with_hundreds_of_errors_lists_the_first_of_them():
    """A file of another kind gives a message that can be read."""
    with pytest.raises(PolicyError, match="300 problems") as refused:
        of("\n".join(f"key_{number} = 1" for number in range(300)))
    assert len(str(refused.value).splitlines()) == 22
    assert str(refused.value).endswith("and 280 more")


def test_one_category_by_code_and_by_name_is_one_rule():
    """Both tables hold: the second changes what the first has not set."""
    rule = of("[categories.S10]\nblock_fpr = 0.02\n[categories.hate]\nwatch_fpr = 0.1").rules["S10"]
    assert rule == Rule("block", 0.02, 0.1)


def test_texts_of_an_operator_have_their_own_version():
    """Those given take the place of the built-in ones."""
    assert of("").alignment == ("watched", VERSION, NORMAL, STRICT)
    changed = of('[alignment]\nmode = "always"\nversion = "school-1"\nnormal = "Be kind."').alignment
    assert changed == ("always", "school-1", "Be kind.", STRICT)


def test_messages_and_spans_are_taken_as_they_are():
    """Messages by code, and the hard list in order."""
    file = of('hard_list = ["Project X", "y"]\n[messages]\nself_harm = "a {help_lines}"\ndefault = "b"')
    assert file.messages == {"S11": "a {help_lines}", "default": "b"}
    assert file.hard_list == ("Project X", "y")


@pytest.mark.parametrize("content", [None, b"a =", b"\xff", b"action = 5"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    """Absent, no TOML, no UTF-8, or wrong inside: the error begins with the file."""
    path = tmp_path / "policy.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PolicyError, match=f"^{path}: "):
        read(path)


def test_a_file_is_read(tmp_path):
    """What is in it is in force."""
    path = tmp_path / "policy.toml"
    path.write_text("block_fpr = 0.02")
    assert read(path).rules["S1"] == replace(Rule(), block_fpr=0.02)
