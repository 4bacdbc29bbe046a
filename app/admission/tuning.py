"""The constants of admission in one place. Settings are what an operator may want to change; these are not
settings.

A share is a part of a whole, from 0 to 1. Where no measurement is named, the value is a judgement.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionTuning:
    """How admission estimates, reserves, lets in and refuses. Each field has its unit, its range and a
    reason."""

    # KV memory
    kv_margin_deviations: float = 2.5
    """Standard deviations, 0 and more: margin over the expected growth. No retraction in any `bench
    overload`."""
    kv_headroom: float = 0.02
    """Share of the pool that is never reserved: pages that are not full."""
    drift_samples: int = 6
    """Looks, at least 1, at `poll_s`: the engine's own count is some steps old, so the least of so many
    counts."""
    spare: float = 0.125
    """Share of pool and places kept for keys that use less than their share: a light key need not wait for
    room."""
    step_tokens: int = 32
    """Tokens, at least 1, of an answer between two looks at its reservation; later an eighth of its length.
    """

    # Prefill window
    prefill_step_tokens: int = 2048
    """Tokens, at least 1: the window after a start, its least, and what it grows by."""
    prefill_min_tokens: int = 64
    """Tokens that a prompt counts at least: each costs a pass."""
    prefill_decrease: float = 0.7
    """Share of the window that late first tokens leave."""

    # Decode window
    decode_look_s: float = 1.0
    """Seconds, over 0, for which TPOT is measured in front of each change."""
    decode_widen_below: float = 0.95
    """Share of the target below which the window widens."""
    decode_first_choices: float = 8.0
    """Choices, at least 1: the window after a start."""
    decode_decrease: float = 0.7
    """Share that a look leaves of it at least: a long prompt makes one slow second."""
    decode_overrun: float = 1.5
    """Windows, at least 1: with more running it does not narrow, as they were let in when it was wider."""
    decode_filled: float = 0.75
    """Share from which the window is full; then TPOT tells how far it may widen."""
    decode_unproven: float = 3.0
    """Times, at least 1, what has run within the target: requests of many choices are let in together."""
    decode_smoothing: float = 0.3
    """Weight of one look in the least TPOT: a burst after a stall is no fast step."""

    # Estimates
    answers_remembered: float = 200.0
    """Answers, at least 1, after which the earlier half counts half."""
    model_answers: float = 4.0
    """Answers, 0 and more, that the model's past is worth beside the key's. Without the key's own past, keys
    of unlike answers get 16% fewer good answers; without the model's, a herd after a restart gets 22% fewer
    tokens."""
    prior_tokens: tuple[float, ...] = (64.0, 256.0, 1024.0)
    """Tokens still to come where nothing is known."""
    prior_weight: float = 0.5
    """Answers that each of them is worth, over 0."""
    new_weight: float = 0.05
    """Weight of one prompt in the share of a prompt that is new to the pool: beginnings are shared."""
    throughput_memory_s: float = 15.0
    """Seconds, over 0: time constant of the throughput. A stored value counts as much, as none ends at first.
    """
    throughput_measured_s: float = 10.0
    """Seconds of waiting after which the throughput is one to remember; less than the time constant."""
    guess_pool_s: float = 8.0
    """Seconds, over 0, that a pool full of requests is taken to run, where nothing is known."""
    guess_tokens_per_s: float = 4096.0
    """Tokens per second, the most that is guessed: a large pool is no fast engine."""
    profile_write_s: float = 60.0
    """Seconds between two writes of the profile."""

    # Turns
    poll_s: float = 0.25
    """Seconds, over 0, between two looks at the clock: deadlines, slots, the engine's count."""
    at_once_s: float = 0.1
    """Seconds in the socket from which a request is prechecked though nothing waits: the process is busy."""
    ageing_s: tuple[float, ...] = (0.0, 5.0, 30.0)
    """Seconds by tier, after which the tiers above no longer pass without limit."""
    aged_share: float = 0.25
    """Tokens that an aged tier gets for each that the tiers above it get."""
    scanned: int = 48
    """Requests, at least 1, looked at for one that fits."""
    scanned_of_key: int = 16
    """The same of one key."""
    bypass: float = 1.0
    """Times the tokens of a request that does not fit: what its key, or lower tiers, may take past it."""
    hard_bypass: float = 16.0
    """The same for all others; from then on everything waits until it fits."""
    few_waiting: int = 2
    """Waiting requests up to which a key is not taken to have a backlog."""
    above_share: float = 1.25
    """Shares of what runs, at least 1, from which on a key has more than its own: keys take turns one by one.
    """
    credit_pools: float = 1.0
    """Pools of tokens, 0 and more, that a refused key may be served less and make up for. With 0 two
    backlogged keys are served 20% apart."""
    wanted_s: float = 5.0
    """Seconds after a refusal without a slot for which a key is taken to want more."""
    recent_s: float = 60.0
    """Seconds after a request for which its key is in use: who reads an answer comes again."""
    forgotten_s: float = 600.0
    """Seconds without a request after which a key's counters are dropped; more than `max_retry_s`."""

    # Refusals
    queue_pools: float = 4.0
    """Pools of tokens that may wait where the setting does not say."""
    usable_deadline: float = 0.25
    """Share of a tier's deadline that waiting may take by expectation."""
    wait_of_ttft: float = 0.4
    """Share of the TTFT target that waiting may take by expectation, in the tiers above batch."""
    young_ages: float = 3.0
    """Times their mean age that requests are taken to run at least; in a steady flow it is 2."""
    late: float = 3.0
    """Times as long as others, at least 1, that requests may wait which come back at their slot."""
    promised: float = 0.75
    """Share of the throughput that slots take; what comes unannounced fills up the rest."""
    return_at: float = 0.2
    """Share of what may wait at which a key's line is to be when those come back who have a slot."""
    jitter: float = 0.1
    """Share of the time to a slot that chance takes off, so that clients do not return together."""
    grace_s: int = 10
    """Seconds, 0 and more, that a request may be late for its slot."""
    max_retry_s: int = 120
    """Seconds, at least 1, to the farthest slot."""
