"""How often a row is seen in training: no source dominates by its size, no fold sees what it leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from scripts.training.safety.rows import Row

QUOTAS: Mapping[str, float] = {
    "aart": 1100,
    "advbench": 650,
    "asked": 2000,
    "benign_agent_prompts": 900,
    "benign_arena_v01": 1100,
    "benign_banking77": 250,
    "benign_clinc": 700,
    "benign_coconot_pref": 1600,
    "benign_creative_roleplay": 900,
    "benign_cyber_frr": 350,
    "benign_cyber_frr_multilingual": 250,
    "benign_fiction_long": 500,
    "benign_fiction_long (half)": 500,
    "benign_flowgpt": 2500,
    "benign_flowgpt_chat": 2000,
    "benign_gpt_instructions": 800,
    "benign_gpteacher": 1500,
    "benign_gsm8k": 150,
    "benign_instructions": 1500,
    "benign_lobe_agents": 1800,
    "benign_long_documents": 1300,
    "benign_medquad": 350,
    "benign_multilingual": 2200,
    "benign_prompts_chat": 800,
    "benign_safe_prompts": 600,
    "benign_selfinstruct": 600,
    "benign_templates": 700,
    "benign_tool_requests": 1200,
    "catqa_harmfulqa": 1200,
    "figstep": 400,
    "gptfuzz_prompts": 110,
    "harmful_indirect": 900,
    "hate_davidson": 900,
    "jailbreak_flowgpt": 120,
    "jailbreak_inthewild": 400,
    "sap200": 350,
    "toxicity_surge": 700,
    "toxigen_safenlp": 1700,
    "xsafety_en": 500,
    "xsafety_multilingual": 2400,
    "out_advbench_strings": 400,
    "out_benign": 3600,
    "out_diasafety": 1100,
    "out_gptfuzz": 4000,
    "out_sap_auto": 1200,
    "benign_arena_v01 as answers": 250,
    "benign_fiction_long as answers": 400,
    "benign_fiction_long (half) as answers": 400,
    "benign_gpteacher as answers": 300,
    "benign_instructions as answers": 250,
    "benign_long_documents as answers": 500,
    "benign_medquad as answers": 150,
    "benign_multilingual as answers": 700,
    "benign_tool_requests as answers": 150,
}
"""How many rows of a source an epoch has, drawn evenly from all that it holds."""
WRITTEN = 2.0
"""How often an epoch has a prompt of the project's that was written by itself; one of a frame comes once."""
LOOK_ALIKE = 1.5
"""How much oftener than that one that only sounds harmful."""
OUTPUT = 1.5
"""How often it has an output of the project's."""

FOLDS: tuple[tuple[str, ...], ...] = (
    ("advbench", "figstep", "hate_davidson", "benign_coconot_pref", "benign_banking77", "harmful_indirect",
     "jailbreak_flowgpt", "benign_flowgpt", "benign_flowgpt_chat", "out_gptfuzz", "out_advbench_strings"),
    ("aart", "xsafety_en", "jailbreak_inthewild", "benign_arena_v01", "benign_gsm8k", "xsafety_multilingual",
     "benign_multilingual", "benign_long_documents", "benign_fiction_long", "out_diasafety",
     "benign_arena_v01 as answers", "benign_fiction_long as answers", "benign_long_documents as answers",
     "benign_multilingual as answers"),
    ("catqa_harmfulqa", "gptfuzz_prompts", "toxicity_surge", "benign_safe_prompts", "benign_selfinstruct",
     "benign_cyber_frr", "benign_cyber_frr_multilingual", "asked", "benign_agent_prompts",
     "benign_creative_roleplay", "benign_gpt_instructions", "benign_templates", "out_benign"),
    ("sap200", "toxigen_safenlp", "benign_gpteacher", "benign_medquad", "benign_clinc", "benign_instructions",
     "benign_lobe_agents", "benign_prompts_chat", "benign_tool_requests", "out_sap_auto",
     "benign_fiction_long (half)", "benign_fiction_long (half) as answers",
     "benign_gpteacher as answers", "benign_medquad as answers", "benign_instructions as answers",
     "benign_tool_requests as answers"),
)  # fmt: skip
"""Sources left out together, so that four trainings leave each out once."""


def for_training(rows: Sequence[Row], left_out: Sequence[str] = (), *, with_own: bool = True) -> list[Row]:
    """What a training may see."""
    return [
        row
        for row in rows
        if row.harmful is not None
        and row.source not in left_out
        and not row.held_out
        and (with_own if row.own else row.source in QUOTAS)
    ]


def weights(rows: Sequence[Row]) -> NDArray[np.float64]:
    """How often an epoch has each row."""
    sizes = Counter(row.source for row in rows)
    return np.array([_weight(row, sizes) for row in rows])


def _weight(row: Row, sizes: Mapping[str, int]) -> float:
    if not row.own:
        return QUOTAS[row.source] / sizes[row.source]
    if row.kind == "output":
        return OUTPUT
    times = WRITTEN if row.source.startswith("written") else 1.0
    return times * LOOK_ALIKE if row.near else times


def drawn(rows: Sequence[Row], count: int, seed: int, own_share: float = 1.0) -> NDArray[np.intp]:
    """`count` rows in a random order, each about as often as its weight says, as evenly as can be.

    The project's rows come `own_share` times as often as that.
    """
    rng = np.random.default_rng(seed)
    share = weights(rows) * [own_share if row.own else 1.0 for row in rows]
    share *= count / share.sum()
    times = np.floor(share + rng.random(len(rows))).astype(np.intp)
    chosen = np.repeat(np.arange(len(rows)), times)
    rng.shuffle(chosen)
    return chosen[:count]
