"""What is remembered of texts: hashes, a bounded number, each owner's for itself."""

from __future__ import annotations

from app.safety.prompt.remembered import Judged, Remembered
from app.safety.verdict import Reading, Verdict


def test_the_text_seen_longest_ago_goes_first():
    """Looking at one counts as seeing it; keys are hashes that another memory does not share."""
    memory = Remembered[int](2)
    one, two, three = (memory.key(text) for text in ("a", "b", "c"))
    memory.put(one, 1)
    memory.put(two, 2)
    assert memory.get(one) == 1
    memory.put(three, 3)
    assert (memory.get(one), memory.get(two), memory.get(three)) == (1, None, 3)
    assert len(one) == 16
    assert Remembered[int](2).key("a") != one


def test_judged_texts_are_bounded():
    """Turns and answers share the room."""
    known = Judged(capacity=3).of("alice", "policy")
    known.add_passed(["a", "b"])
    known.add_answers(["c", "d"])
    assert [known.is_passed("a"), known.is_passed("b")] == [False, True]
    assert [known.is_answer("c"), known.is_answer("d")] == [True, True]


def test_a_turn_is_no_answer_and_an_owner_cannot_pretend_to_be_another():
    """What somebody asked is not what the server said, and names do not run into texts."""
    judged = Judged()
    judged.of("alice", "p").add_passed(["x"])
    assert not judged.of("alice", "p").is_answer("x")
    judged.of("a", "p").add_passed(["b\0x"])
    assert not judged.of("a\0b", "p").is_passed("x")


def test_turns_that_had_a_prompt_watched_are_remembered_by_owner_and_policy():
    """The newest of several; another owner's, and those under another policy, count for nothing."""
    judged = Judged()
    alices = judged.of("alice", "policy")
    first, second = (Verdict("watch", "S2", score, 0.4, "encoder", "policy") for score in (0.5, 0.6))
    alices.add_watched(["a"], first)
    alices.add_watched(["b"], second)
    assert alices.watched_by(["a", "b", "c"]) is second
    assert alices.watched_by(["c"]) is None
    assert judged.of("bob", "policy").watched_by(["a"]) is None
    assert judged.of("alice", "other").watched_by(["a"]) is None


def test_a_watched_turn_is_remembered_without_the_readings_of_its_prompt():
    """A later prompt has readings of its own."""
    judged = Judged().of("alice", "policy")
    readings = [Reading("encoder", {"S2": 0.6})]
    verdict = Verdict("watch", "S2", 0.6, 0.4, "encoder", "policy", readings=readings)
    judged.add_watched(["a"], verdict)
    remembered = judged.watched_by(["a"])
    assert remembered is not None
    assert (remembered.action, list(remembered.readings)) == ("watch", [])


def test_turns_that_were_recorded_are_remembered_apart():
    """By owner and policy; they are not let pass by that."""
    memory = Judged()
    judged = memory.of("alice", "policy")
    judged.add_recorded(["a"])
    assert judged.is_any_recorded(["b", "a"])
    assert not judged.is_any_recorded(["b"])
    assert not judged.is_passed("a")
    assert not memory.of("bob", "policy").is_any_recorded(["a"])
    assert not memory.of("alice", "other").is_any_recorded(["a"])
