"""`model: "auto"`: which model is chosen, in which order the rules hold, what is told and counted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import pytest

from app.core import ChatRequest, Health, ModelCard
from app.routing.backend import Backend
from app.routing.router import Router, points_of
from app.store.conversations import BranchSummary

SMALL = ModelCard("small-1b", 8192, 100_000, 8000, frozenset({"tools", "json_schema"}))
LARGE = ModelCard(
    "large-70b",
    131_072,
    500_000,
    130_000,
    frozenset({"vision", "tools", "json_schema", "reasoning", "logprobs"}),
)

EASY = (
    "Hi!",
    "Thanks, that was all.",
    "What is the capital of Portugal?",
    "Translate 'good morning' into French.",
    "When does daylight saving time begin?",
    "Give me a synonym of happy.",
    "Tell me a joke about cats",
    "How many grams are in an ounce?",
    "Rephrase: I will not come tomorrow.",
    "Who wrote Faust?",
    "What should I cook with rice and leek tonight?",
    "Write a birthday greeting for my aunt.",
    "Is a tomato a fruit?",
    "Make a title for a blog about bread",
    "Was bedeutet das Wort Schildkröte?",
    "List five colours.",
    "What does 'ubiquitous' mean? Define it.",
    "Correct the spelling: recieve, adress",
    "What is 3 + 4?",
    "Remind me what HTTP stands for.",
)
HARD = {
    "Write a Python function that merges overlapping intervals.": "code",
    "```\nfor x in y: print(x)\n```\nwhat does this do?": "code",
    "def f(x):\n    return x\n\nwhy is this slow?": "code",
    "SELECT a FROM b WHERE c == 1 and d != 2; make it faster": "code",
    "My Rust code fails: the compiler says borrowed value does not live long enough": "code",
    "Refactor this class so that it has tests": "code",
    "Prove that the square root of two is irrational; is this a theorem of Euclid?": "math",
    "Evaluate $$\\int_0^1 x^2 dx$$": "math",
    "What is the probability that two dice sum to 7?": "math",
    "Find the eigenvalues of the matrix [[2,1],[1,2]]": "math",
    "Solve the equation 3 * 4 + x = 20": "math",
    "Compare the trade-offs of event sourcing and plain CRUD.": "words",
    "Design a migration strategy from a monolith, with risks.": "words",
    "Analyse the causes of the French revolution and argue which one weighed most.": "words",
    "Review this contract for legal risks": "words",
    "Write a comprehensive essay on Kant's ethics": "words",
}


def asked(text: str = "Hi!", **body: Any) -> ChatRequest:
    """A request with one message, or with those given."""
    messages = body.pop("messages", [{"role": "user", "content": text}])
    max_tokens, logprobs = body.pop("max_tokens", None), body.pop("logprobs", False)
    return ChatRequest(
        "r", "ann", "auto", {"messages": messages, **body}, 0, max_tokens=max_tokens, logprobs=logprobs
    )


@dataclass
class Engine:
    """One with that model, which is there or away."""

    model: ModelCard
    state: Health = Health.READY

    def health(self) -> Health:
        """As it is set."""
        return self.state


def placed(card: ModelCard, state: Health = Health.READY) -> Backend:
    """Where a model is served."""
    return Backend(cast("Any", Engine(card, state)), cast("Any", None), card.id)


@pytest.fixture
def router() -> Router:
    """A router between the two."""
    return Router(placed(SMALL), placed(LARGE))


@pytest.mark.parametrize("text", EASY)
def test_simple_questions_go_to_the_small_model(router: Router, text: str) -> None:
    """Short, with no code, no mathematics and no word that asks for work."""
    route = router.route(asked(text), 30)
    assert (route.size, route.reason) == ("small", "simple"), route.header


@pytest.mark.parametrize("text", HARD)
def test_hard_questions_go_to_the_large_model(router: Router, text: str) -> None:
    """By code, by mathematics, or by the words that ask for work; the reason says which."""
    route = router.route(asked(text), 30)
    assert (route.size, route.reason) == ("large", HARD[text]), route.header


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "vision"),
        ({"reasoning_effort": "high"}, "reasoning"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 8190}, "context"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"messages": [{"role": "user", "content": f"and {n}?"} for n in range(9)]}, "depth"),
    ],
)
def test_what_else_takes_the_large_model(router: Router, body: dict[str, Any], reason: str) -> None:
    """What the small one cannot do at all, tools, and a conversation that goes on for long."""
    assert router.route(asked(**body), 30).reason == reason


def test_a_long_prompt_takes_the_large_model(router: Router) -> None:
    """By its tokens; beyond the small model's context because it does not fit."""
    assert router.route(asked(), 1499).size == "small"
    assert router.route(asked(), 1500).reason == "length"
    assert router.route(asked(), 8100).reason == "context"


def test_tools_that_are_not_to_be_called_are_none(router: Router) -> None:
    """`tool_choice: "none"`."""
    assert router.route(asked(tools=[{}], tool_choice="none"), 30).size == "small"


def test_the_caller_s_choice_is_first(router: Router) -> None:
    """`x-route` overrides every rule, but not what the key may use."""
    hard = next(iter(HARD))
    assert router.route(asked(hard), 30, requested="small").header == "small; asked"
    assert router.route(asked(), 30, requested="large").model == "large-70b"
    route = router.route(asked(hard), 30, requested="large", allowed={"small-1b"})
    assert (route.model, route.reason) == ("small-1b", "key")


def test_a_key_s_only_model_answers(router: Router) -> None:
    """Whatever it is asked."""
    assert router.route(asked(), 30, allowed=("large-70b", "other")).header == "large; key"


def test_a_conversation_stays_with_the_large_model(router: Router) -> None:
    """Its prefix is cached there, and its answers are like each other; from small to large it may go."""
    assert router.route(asked("Thanks!"), 30, branch=BranchSummary("large-70b")).reason == "conversation"
    assert router.route(asked("Thanks!"), 30, branch=BranchSummary("small-1b")).size == "small"
    assert router.route(asked(next(iter(HARD))), 30, branch=BranchSummary("small-1b")).size == "large"


def test_what_a_conversation_has_been_counts(router: Router) -> None:
    """Its length and its turns, which the request itself does not show."""
    assert router.route(asked("and?"), 30, branch=BranchSummary("small-1b", 200, 7)).reason == "depth"
    assert router.route(asked("and?"), 30, branch=BranchSummary("small-1b", 1600, 1)).reason == "length"
    assert router.route(asked("and?"), 30, branch=BranchSummary("small-1b", 8200, 1)).reason == "context"


def test_images_of_a_conversation_need_a_model_that_sees(router: Router) -> None:
    """Though the request itself has none."""
    assert (
        router.route(asked("and?"), 30, branch=BranchSummary(turns=1, images=True)).header == "large; vision"
    )


@pytest.mark.parametrize("away", ["small", "large"])
def test_where_one_is_away_the_other_answers(away: str) -> None:
    """Whatever is asked, and by whom; a key that may use no other waits for its own."""
    states = {size: Health.STARTING if size == away else Health.READY for size in ("small", "large")}
    router = Router(placed(SMALL, states["small"]), placed(LARGE, states["large"]))
    other = "large" if away == "small" else "small"
    for text in ("Hi!", next(iter(HARD))):
        assert router.route(asked(text), 30).header == f"{other}; alone"
    assert router.route(asked(), 30, requested=cast("Any", away)).header == f"{other}; alone"
    own = {"small": "small-1b", "large": "large-70b"}[away]
    assert router.route(asked(), 30, allowed={own}).header == f"{away}; key"


def test_the_small_model_serves_what_only_it_can(router: Router) -> None:
    """A capability that the large one has not."""
    blind = Router(placed(LARGE), placed(SMALL))  # the roles exchanged
    assert blind.route(asked(logprobs=True), 30).header == "small; logprobs"


def test_the_reason_is_told_with_its_points(router: Router) -> None:
    """The header has the model's size, the rule that weighed most, and every rule that gave points."""
    route = router.route(asked("Write a Python function, with a test; thanks"), 30)
    assert route.header == "large; code; code=+4, task=+1, easy=-1"


def test_every_decision_is_counted(router: Router) -> None:
    """By model and reason."""
    router.route(asked(), 30)
    router.route(asked(), 30)
    router.route(asked(), 30, requested="large")
    assert router.routed == {"small-1b": {"simple": 2}, "large-70b": {"asked": 1}}


def test_earlier_code_counts_and_old_code_does_not(router: Router) -> None:
    """The last three turns of the user are read for code."""
    turns = ["```x```", "and then?", "shorter"]
    messages = [{"role": "user", "content": text} for text in turns]
    assert router.route(asked(messages=messages), 30).reason == "code"
    messages += [{"role": "user", "content": "thanks"}]
    assert router.route(asked(messages=messages), 30).size == "small"


def test_a_huge_prompt_is_read_in_bounded_time() -> None:
    """Ten million characters cost what ten thousand do, but for joining them."""
    request = asked("=1*" * 3_000_000)
    points_of(request, 30)
    started_s = time.thread_time()
    points_of(request, 30)
    assert time.thread_time() - started_s < 0.1


def test_any_shape_of_content_is_read(router: Router) -> None:
    """No user turn at all, null content, parts."""
    odd = [
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": [{"type": "text", "text": "42"}]},
    ]
    assert router.route(asked(messages=odd), 30).size == "small"
    parts = [{"role": "user", "content": [{"type": "text", "text": "```x```"}]}]
    assert router.route(asked(messages=parts), 30).reason == "code"
