"""Writes the trained network as a model folder that transformers and SGLang load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from scripts.training.builtin_model.model import Shape, SmallLlama
from scripts.training.builtin_model.tokenizer import SPECIAL

PAD_ID, START_ID, END_ID = range(len(SPECIAL))


def write_model(model: SmallLlama, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    _write_json(folder / "config.json", model_config(model.shape))
    _write_json(folder / "generation_config.json", generation_config())
    save_file(model.exported(torch.bfloat16), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def model_config(shape: Shape) -> dict[str, object]:
    """The `config.json` of a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def generation_config() -> dict[str, object]:
    """Sampling that a request without its own gets: cool, so that a tiny model keeps to what it knows."""
    return {
        "do_sample": True,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "temperature": 0.2,
        "top_k": 20,
        "top_p": 0.9,
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
