"""The cost of a grammar over an answer: an allowance for each token, and a debt with an end."""

from app.engine.grammar.cost import BURST_TOKENS, CostMeter


def test_tokens_within_their_allowance_make_no_debt() -> None:
    """However many there are."""
    meter = CostMeter(mask_ms=2.0)
    for _ in range(1000):
        meter.spend(2.0)
    assert (meter.debt_ms, meter.spent_ms, meter.tokens) == (0.0, 2000.0, 1000)
    assert not meter.exceeded


def test_a_dear_token_is_paid_off_by_cheap_ones() -> None:
    """A burst may cost up to its bound, and the debt goes down with each token after it."""
    meter = CostMeter(mask_ms=2.0)
    meter.spend(BURST_TOKENS * 2.0 + 2.0)
    assert not meter.exceeded
    meter.add(0.1)
    assert meter.exceeded
    meter.spend(0.0)
    assert not meter.exceeded


def test_a_smaller_allowance_of_a_token_counts_in_its_place() -> None:
    """Several grammars in one step share the step's time."""
    meter = CostMeter(mask_ms=2.0)
    meter.spend(1.0, allowed_ms=0.5)
    assert meter.debt_ms == 0.5


def test_the_words_name_the_cost_the_tokens_and_the_budget() -> None:
    """A caller reads what it took and what it may take."""
    meter = CostMeter(mask_ms=2.0)
    meter.spend(1500.0)
    assert meter.in_words() == (
        "choosing its tokens took 1,500 ms of the scheduler's time over 1 tokens;"
        " a grammar may take 2 ms a token, and 100 ms beyond it at once"
    )
