"""A Llama of 8 billion random parameters: Llama 3.1 8B's shape, weights that SGLang makes up as it loads.

Nothing is downloaded. The tokenizer is the built-in model's, padded with words to the size of the vocabulary,
so that each id is text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.engine.sglang.args import BUILTIN_MODEL

NAME = "llama-8b-random"
SERVER_ARGS: Mapping[str, Any] = {"load_format": "dummy"}
SHAPE: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "vocab_size": 128256,
    # Llama's is 131,072: SGLang keeps a table of that many ids for each running request.
    "max_position_embeddings": 16384,
}
TINY_SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 12000,
    "max_position_embeddings": 4096,
}
"""Of a dry run."""
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def make(folder: Path, shape: Mapping[str, Any] = SHAPE) -> Path:
    """Write the model's configuration and tokenizer into `folder`; there are no weights to write."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **shape}, indent=1))
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODEL / name, folder / name)
    tokenizer = json.loads((BUILTIN_MODEL / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    for token_id in range(len(vocabulary), shape["vocab_size"]):
        vocabulary[f"Ġr{token_id}"] = token_id  # no merge leads there: prompts are cut as before
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return folder
