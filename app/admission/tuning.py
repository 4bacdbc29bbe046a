"""The constants of admission. What an operator may want to change is a setting instead (app.settings).

A *share* is a number from 0 to 1. A value without a measurement is a judgement.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionTuning:
    """The numbers of admission. A comment has unit, range and reason."""

    # KV memory
    # Deviations over the mean growth, >= 0: no retraction in `bench overload`.
    kv_margin_deviations: float = 2.5
    kv_headroom: float = 0.02  # share of the pool that is never allocated: pages that are not full
    drift_samples: int = 6  # looks, >= 1, of which the least counts: the engine's own count is some steps old
    # Share of pool and places kept for keys that use less than theirs: they need not wait.
    spare_share: float = 0.125
    # Tokens of an answer, >= 1, between looks at its allocation; later 1/8 of its length.
    step_tokens: int = 32

    # Tokens of other requests, >= 0, that a replica may have more of than another for each token of a prompt
    # that it has cached: computing a token again takes the time of a pass, holding one takes memory only.
    replica_stay: float = 4.0

    # Prefill window
    prefill_step_tokens: int = 2048  # tokens, >= 1: the window after a start, its least, and what it grows by
    prefill_min_tokens: int = 64  # tokens, >= 0, that a prompt counts at least: each costs a pass
    prefill_decrease: float = 0.7  # share of the window that late first tokens leave

    # Decode window
    decode_look_s: float = 1.0  # seconds, > 0, over which the time per output token is measured
    decode_widen_below: float = 0.95  # share of the target below which the window widens
    decode_first_choices: float = 8.0  # choices, >= 1, of the window after a start
    decode_decrease: float = 0.7  # share that a look leaves at least: a long prompt makes one slow second
    decode_overrun: float = 1.5  # windows, >= 1: with more running it was narrowed for them already
    # Share of the window from which its time per token tells how far it may widen.
    decode_filled: float = 0.75
    # Factor, >= 1: the window may be this many times the choices that have kept the target so far.
    decode_unproven: float = 3.0
    # Weight of one look in the least time per token; a small weight keeps a burst after a stall from counting
    # as the least.
    decode_smoothing: float = 0.3

    # Estimates
    answers_remembered: float = 200.0  # answers, >= 1, after which the older ones count half
    # Answers, >= 0, that the model's past is worth beside the key's. With the model's alone, unlike keys get
    # 16% fewer good answers; with the key's alone a herd gets 26% fewer tokens in the minute after a restart.
    model_answers: float = 4.0
    prior_tokens: tuple[float, ...] = (64.0, 256.0, 1024.0)  # remaining tokens where nothing is known
    prior_weight: float = 0.5  # answers, > 0, that each of these is worth
    # Weight of a prompt in the ratio of new to estimated tokens: beginnings are shared.
    new_weight: float = 0.05
    # Tokens, >= 1, that a prompt is believed for each estimated one: unread history.
    max_new_ratio: float = 4.0
    throughput_memory_s: float = 15.0  # seconds, > 0: time constant, and what a stored throughput is worth
    throughput_measured_s: float = 10.0  # seconds of waiting, below the above, after which it is stored
    guess_pool_s: float = 8.0  # seconds, > 0, that a full pool is taken to run where nothing is known
    guess_tokens_per_s: float = 4096.0  # tokens/s guessed at most: a large pool is no fast engine
    # Requests that may wait before throughput was measured. Of a herd of 2,000 at a first start, the 99th
    # percentile of first tokens arrived after 1.5 s with 0, 1.6 s with 8, 2.0 s with 16 and 3.6 s with 64.
    unmeasured_waiting: int = 8
    profile_write_s: float = 60.0  # seconds, >= 0, between two writes of the profile

    # Turns
    poll_s: float = 0.25  # seconds, > 0, between looks at deadlines, slots and the engine's count
    at_once_s: float = 0.1  # seconds in the socket from which a request is prechecked though nothing waits
    ageing_s: tuple[float, ...] = (0.0, 5.0, 30.0)  # seconds by tier, after which higher ones are limited
    aged_share: float = 0.25  # tokens of an aged tier for each token of the tiers above it
    max_scanned: int = 48  # requests, >= 1, looked at for one that fits
    max_scanned_of_key: int = 16  # the same of one key
    bypass: float = 1.0  # times the tokens of a request that does not fit, which its key may take past it
    hard_bypass: float = 16.0  # the same for all others; then everything waits until it fits
    few_waiting: int = 2  # waiting requests up to which a key has no backlog
    above_share: float = 1.25  # shares of what runs, >= 1, up to which a key has no more than its own
    # Pools of tokens, >= 0, that a refused key makes up for: with 0 two keys are served 20% apart, else 2%.
    credit_pools: float = 1.0
    wanted_s: float = 5.0  # seconds after a refusal without a slot in which its key is taken to want more
    recent_s: float = 60.0  # seconds after a request in which its key is in use: its reader may return
    # Seconds, over `poll_s`: if nothing has run for so long, one key may take more than its share at once. A
    # program sends its next request sooner; a person may find the engine idle.
    idle_s: float = 1.0
    forgotten_s: float = 600.0  # seconds, over `max_retry_s`, after which an idle key's counters are dropped

    # Refusals
    queue_pools: float = 4.0  # pools of tokens, > 0, that may wait where the setting does not say
    usable_deadline: float = 0.25  # share of a tier's deadline that waiting may take by expectation
    wait_of_ttft: float = 0.4  # share of the TTFT target that it may take, in the tiers above batch
    min_run_ages: float = 3.0  # mean ages, >= 2, that requests run at least; 2 in a steady flow
    # Factor, >= 1, of the wait allowed to requests that return at their slot. If all clients obey,
    # 0.92 of them are admitted with 2.5, and 0.95 with 3.0.
    slot_wait_factor: float = 3.0
    slots_share: float = 0.75  # share of the throughput that slots take; other requests fill up the rest
    return_at: float = 0.2  # share of the queue bound at which requests with a slot return
    jitter: float = 0.1  # share of the time to a slot that chance takes off: clients do not return together
    grace_s: int = 10  # seconds, >= 0, that a request may be late for its slot
    max_retry_s: int = 120  # seconds, >= 1, to the farthest slot
