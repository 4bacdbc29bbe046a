"""Turns in the tree of a conversation, and the branch that the next one continues."""

from __future__ import annotations

import time

import orjson
import pytest

from app.errors import BadRequest, NotFound
from app.store import conversations
from app.store.conversations import (
    MAX_BRANCH_MESSAGES,
    ROOT,
    BranchSummary,
    NewMessage,
    NewTurn,
    summarize_branch,
)
from tests.support.conversing import NOW_US, Chats

# Branches


def test_next_turn_continues_the_last():
    """Without a parent, a turn goes below the newest answer."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1")
    second = chats.turn(asked="two", answered="2")
    assert chats.heard() == ["one", "1", "two", "2"]
    assert chats.branch().last_id == second
    assert chats.parent_of(chats.parent_of(second)) == first


def test_regenerated_answer_is_a_sibling():
    """An empty turn below a message of the user answers it again; the first answer stays."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1")
    question = chats.parent_of(first)
    again = chats.begin("conv_1", parent=question)
    chats.finish(again, "uno")
    assert chats.parent_of(again[0]) == question
    assert chats.heard() == ["one", "uno"]
    assert chats.heard(first) == ["one", "1"]
    assert chats.heard(question) == ["one"]


def test_edited_turn_hangs_below_the_parent_of_what_it_replaces():
    """Naming the message before a turn begins another branch there."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1")
    old = chats.turn(asked="two", answered="2")
    new = chats.turn(asked="deux", answered="II", parent=first)
    assert chats.heard(new) == ["one", "1", "deux", "II"]
    assert chats.heard(old) == ["one", "1", "two", "2"]


def test_root_begins_above_the_first_message():
    """The parent `root` has no history; the first turn stays."""
    chats = Chats()
    old = chats.turn(asked="one", answered="1")
    new = chats.turn(asked="uno", answered="I", parent=ROOT)
    assert chats.heard() == ["uno", "I"]
    assert chats.heard(old) == ["one", "1"]
    assert chats.parent_of(chats.parent_of(new)) is None


def test_of_several_choices_the_first_goes_on():
    """A turn with several answers is continued from the first, or from the one that is named."""
    chats = Chats()
    answer_ids = chats.begin("conv_1", "one", choices=3)
    chats.finish(answer_ids, "a", "b", "c")
    assert chats.heard() == ["one", "a"]
    assert chats.heard(answer_ids[2]) == ["one", "c"]


def test_message_is_read_as_it_was_sent():
    """Parts, names and calls come back as they were."""
    chats = Chats()
    message = {"role": "user", "content": [{"type": "text", "text": "what?"}], "name": "Ada"}
    chats.turn(asked=NewMessage("msg_parts", "user", "what?", orjson.dumps(message)))
    assert chats.branch().messages[0] == message


@pytest.mark.parametrize(
    "text", ["a\0b\0", "\0", "😀\U0010ffff", "\u202eright\u200fleft\u2066", "e\u0301\r\n\x1b"]
)
def test_text_is_stored_byte_for_byte(text: str):
    """Nothing is trimmed, cut or normalised."""
    chats = Chats()
    chats.turn(asked=NewMessage("msg_1", "user", text), answered=text)
    assert chats.heard() == [text, text]


# Answers that are not complete


@pytest.mark.parametrize("status", ["cancelled", "interrupted", "failed"])
def test_what_was_said_stays(status):
    """An answer that was cut is history, as far as it came."""
    chats = Chats()
    chats.turn(asked="one", answered="1, and th", status=status)
    assert chats.heard() == ["one", "1, and th"]


def test_an_answer_and_those_that_continue_it_are_read_as_one():
    """No template gets two turns of one speaker in a row; the tree keeps each."""
    chats = Chats()
    cut = chats.turn(asked="one", answered="1, and th", status="cancelled")
    rest = chats.begin("conv_1", parent=cut)
    chats.finish(rest, "en ", status="cancelled")
    end = chats.begin("conv_1", parent=rest[0])
    chats.finish(end, "2")
    assert chats.heard() == ["one", "1, and then 2"]
    assert list(chats.branch().answered) == [False, True]
    assert chats.heard(cut) == ["one", "1, and th"]
    assert chats.parent_of(end[0]) == rest[0]


@pytest.mark.parametrize("status", ["cancelled", "interrupted", "failed"])
def test_unanswered_turn_is_left_out(status):
    """Where nothing was said, neither answer nor question is history; the tree keeps both."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1")
    failed = chats.turn(asked="two", answered="", status=status)
    assert chats.heard() == ["one", "1"]
    assert chats.branch().last_id == first
    assert chats.heard(failed) == ["one", "1"]
    assert chats.parent_of(failed) is not None


def test_answer_in_progress_is_left_out():
    """A turn that is being answered is no history yet."""
    chats = Chats()
    chats.turn(asked="one", answered="1")
    chats.begin("conv_1", "two")
    assert chats.heard() == ["one", "1"]


def test_empty_answer_that_is_complete_stays():
    """A model may say nothing."""
    chats = Chats()
    chats.turn(asked="one", answered="")
    assert chats.heard() == ["one", ""]


def test_system_message_outlives_a_failed_first_turn():
    """What the first turn asked is left out, what it set up is not."""
    chats = Chats()
    answer_ids = chats.begin("conv_1", NewMessage("msg_system", "system", "Be brief."), "one")
    chats.finish(answer_ids, "", status="failed")
    assert chats.heard() == ["Be brief."]
    assert chats.branch().last_id == "msg_system"


def test_failed_first_turn_leaves_nothing():
    """A conversation whose only turn failed goes on from the top."""
    chats = Chats()
    chats.turn(asked="one", answered="", status="failed")
    past = chats.branch()
    assert (past.parent_seq, past.last_id, past.messages, past.runs) == (None, None, [], [])


def test_regeneration_that_failed_does_not_cut_the_conversation():
    """The newest answer that said something goes on."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1")
    chats.turn(asked="two", answered="2")
    chats.finish(chats.begin("conv_1", parent=chats.parent_of(first)), "", status="failed")
    assert chats.heard() == ["one", "1", "two", "2"]


def test_choice_that_said_something_goes_on():
    """Of several answers, the first that was not empty."""
    chats = Chats()
    answer_ids = chats.begin("conv_1", "one", choices=2)
    chats.finish(answer_ids, "", "b", status="cancelled")
    assert chats.heard() == ["one", "b"]


def test_cut_tool_calls_are_not_read_again():
    """The arguments of a call in an answer that was cut may be half JSON."""
    chats = Chats()
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    body = orjson.dumps({"role": "assistant", "content": "Let me", "tool_calls": [call]})
    chats.turn(answered="Let me", body=body, status="cancelled")
    assert chats.branch().messages[-1] == {"role": "assistant", "content": "Let me"}
    chats.turn(answered="Let me", body=body)
    assert chats.branch().messages[-1]["tool_calls"] == [call]


# Token ids


def test_runs_lead_up_to_the_newest_answer():
    """Each run is a prompt after the run before it, and its answer."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1", prompt_ids=b"p1", ids=b"a1")
    second = chats.turn(asked="two", answered="2", prompt_ids=b"p2", ids=b"a2", base_seq=chats.seq(first))
    assert chats.branch().runs == [(chats.seq(first), b"p1a1"), (chats.seq(second), b"p2a2")]
    assert chats.branch(chats.parent_of(second)).runs == [(chats.seq(first), b"p1a1")]


def test_rerendered_prompt_begins_anew():
    """An answer without a base has its whole prompt with it."""
    chats = Chats()
    chats.turn(asked="one", answered="1", prompt_ids=b"p1", ids=b"a1")
    second = chats.turn(asked="two", answered="2", prompt_ids=b"all", ids=b"a2")
    assert chats.branch().runs == [(chats.seq(second), b"alla2")]


def test_answer_without_ids_is_skipped():
    """The newest answer that has ids is the one whose sequence can be shared."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1", prompt_ids=b"p1", ids=b"a1")
    chats.turn(asked="two", answered="2")
    assert chats.branch().runs == [(chats.seq(first), b"p1a1")]


def test_runs_with_a_gap_are_none():
    """Where a part of the sequence is not on the branch, there is nothing to share."""
    chats = Chats()
    chats.turn(asked="one", answered="1", prompt_ids=b"p1", ids=b"a1")
    chats.turn(asked="two", answered="2", prompt_ids=b"p2", ids=b"a2", base_seq=999)
    assert chats.branch().runs == []


# Who finds what


def test_unknown_foreign_and_deleted_conversations_are_not_found():
    """All three look the same."""
    chats = Chats()
    chats.turn("conv_mine")
    chats.turn("conv_deleted")
    chats.c.execute("UPDATE conversations SET deleted_at_us = 1 WHERE id = 'conv_deleted'")
    for owner, conversation_id in (("local", "conv_x"), ("other", "conv_mine"), ("local", "conv_deleted")):
        with pytest.raises(NotFound, match=conversation_id) as refused:
            conversations.branch(chats.c, owner, conversation_id, None)
        assert refused.value.code == "conversation_not_found"


def test_message_of_another_conversation_is_not_found():
    """A parent must be of the conversation itself."""
    chats = Chats()
    other = chats.turn("conv_2")
    chats.turn("conv_1")
    for parent in (other, "msg_x", ""):
        with pytest.raises(NotFound) as refused:
            chats.branch(parent)
        assert (refused.value.code, refused.value.param) == ("message_not_found", "parent_id")


def test_turn_of_a_deleted_conversation_is_refused():
    """A conversation deleted while its next turn was prepared takes no more."""
    chats = Chats()
    chats.turn()
    chats.c.execute("UPDATE conversations SET deleted_at_us = 1")
    late = NewTurn("conv_1", "local", "llama", "", False, None, [], [], NOW_US)
    with pytest.raises(NotFound):
        conversations.ensure(chats.c, late)


# Sums


def test_tokens_of_all_turns_are_summed():
    """A conversation's total is that of its requests."""
    chats = Chats()
    chats.turn()
    chats.turn(answered="", status="failed")
    assert chats.c.execute("SELECT total_tokens FROM conversations").fetchone() == (30,)


def test_updated_time_never_steps_back():
    """A clock that does leaves the later time."""
    chats = Chats()
    chats.turn()
    chats.c.execute("UPDATE conversations SET updated_at_us = ?", (NOW_US * 2,))
    chats.turn()
    assert chats.c.execute("SELECT updated_at_us FROM conversations").fetchone() == (NOW_US * 2,)


def test_answer_of_a_purged_conversation_is_dropped():
    """What ends after its conversation is gone breaks nothing."""
    chats = Chats()
    answer_ids = chats.begin("conv_1", "one")
    chats.c.execute("DELETE FROM conversations")
    gone = conversations.FinishedAnswer(answer_ids[0], "1", None, "complete", "stop", b"", b"", None)
    conversations.finish_answers(chats.c, [gone], NOW_US, 15)
    assert chats.c.execute("SELECT count(*) FROM messages").fetchone() == (0,)


def test_conversation_of_10_000_messages_loads_quickly():
    """Its whole branch in well under a second, each turn with ids."""
    chats = Chats()
    chats.turn(asked="0", answered="0", prompt_ids=bytes(40), ids=bytes(400))
    base_seq = chats.seq(chats.branch().last_id)
    row = chats.c.execute("SELECT conversation_seq, request_seq FROM messages WHERE seq = ?", (base_seq,))
    conversation_seq, request_seq = row.fetchone()
    for i in range(1, 5000):
        turn = NewTurn(
            "conv_1",
            "local",
            "llama",
            "",
            False,
            base_seq,
            [NewMessage(f"q{i}", "user", f"{i}")],
            [f"a{i}"],
            0,
        )
        conversations.add_turn(chats.c, turn, conversation_seq, request_seq)
        answer = conversations.FinishedAnswer(
            f"a{i}", f"{i}", None, "complete", "stop", bytes(400), bytes(40), base_seq
        )
        conversations.finish_answers(chats.c, [answer], 0, 0)
        base_seq = chats.seq(f"a{i}")
    started_s = time.thread_time()
    past = chats.branch("a4999")
    took_s = time.thread_time() - started_s
    assert [m["content"] for m in past.messages] == [str(i) for i in range(5000) for _ in "qa"]
    assert len(past.runs) == 5000
    assert took_s < 1


# A branch in numbers


def test_what_a_branch_has_been():
    """Its last answer's model and tokens, as billed, and the turns of the user on it."""
    chats = Chats()
    first = chats.turn(asked="one", answered="1")
    second = chats.turn(asked="two", answered="2")
    chats.turn(asked="deux", answered="II", parent=first)
    for parent, turns in ((None, 2), (second, 2), (first, 1), (chats.parent_of(second), 2)):
        assert summarize_branch(chats.c, "local", "conv_1", parent) == BranchSummary("llama", 15, turns)
    assert summarize_branch(chats.c, "local", "conv_1", ROOT) == BranchSummary()
    assert summarize_branch(chats.c, "local", "conv_1", chats.parent_of(first)) == BranchSummary(turns=1)


def test_whether_a_branch_has_images():
    """On it, not beside it; what a text says of them is none."""
    chats = Chats()
    named = [{"type": "text", "text": '{"type":"image_url"}'}]
    shown = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    bodies = [orjson.dumps({"role": "user", "content": parts}) for parts in (named, shown)]
    first = chats.turn(asked=NewMessage("msg_1", "user", "", bodies[0]))
    chats.turn(asked=NewMessage("msg_2", "user", "", bodies[1]))
    assert not summarize_branch(chats.c, "local", "conv_1", first).images
    assert summarize_branch(chats.c, "local", "conv_1", None).images


def test_a_branch_of_another_is_not_found():
    """Nor one that there is not."""
    chats = Chats()
    chats.turn()
    for owner, conversation_id in (("ann", "conv_1"), ("local", "conv_2")):
        with pytest.raises(NotFound):
            summarize_branch(chats.c, owner, conversation_id, None)


def test_a_turn_of_a_long_conversation_is_refused_without_reading_it():
    """What refuses it does not go with the number of its messages; higher up it still goes on."""
    chats = Chats()
    chats.turn()
    chats.c.execute(
        "WITH RECURSIVE n (i) AS (SELECT 3 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
        " INSERT INTO messages (seq, id, conversation_seq, parent_seq, role, text, created_at_us, status)"
        " SELECT i, 'msg_' || i, 1, i - 1, 'user', 'x', 1, 'complete' FROM n",
        (3 * MAX_BRANCH_MESSAGES,),
    )
    assert len(chats.branch(f"msg_{MAX_BRANCH_MESSAGES}").messages) == MAX_BRANCH_MESSAGES
    with pytest.raises(BadRequest) as refused:
        chats.branch(f"msg_{3 * MAX_BRANCH_MESSAGES}")
    assert refused.value.code == "conversation_too_long"
    steps: list[int] = []
    chats.c.set_progress_handler(lambda: steps.append(1), 1000)
    assert chats.heard() == ["hello", "hi"]
    assert len(steps) < 3


def test_a_turn_continues_a_bounded_number_of_bytes(monkeypatch):
    """Text, bodies and ids together; the branch above still goes on."""
    monkeypatch.setattr(conversations, "MAX_BRANCH_BYTES", 1 << 20)
    chats = Chats()
    first = chats.turn()
    chats.turn(asked="x" * (1 << 20))
    with pytest.raises(BadRequest) as refused:
        chats.branch()
    assert (refused.value.code, refused.value.param) == ("conversation_too_long", "conversation_id")
    assert chats.heard(first) == ["hello", "hi"]
