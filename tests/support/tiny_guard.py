"""Guard models of 0.1 M random parameters that SGLang serves: of any family's template, of no judgement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.safety.guard.templates import FORMATS, GuardFormat

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<|start_of_role|>",
    "<|end_of_role|>",
)
WORDS = "safe unsafe Safety: Safe Unsafe Controversial Categories: None Yes No S1 S2 S9 Violent"


def build(folder: Path, form: GuardFormat) -> Path:
    """Write a model with the format's template, and its tokenizer, into `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(form)
    torch.manual_seed(1)
    end = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(tokenizer),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def template(folder: Path, form: GuardFormat) -> Path:
    """Write the format's template as a guard's server gets it."""
    path = folder / f"{form.name}.jinja"
    path.write_text(form.template)
    return path


def _tokenizer(form: GuardFormat) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator([WORDS, *(known.template for known in FORMATS)] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|end_of_text|>",
        pad_token="<|end_of_text|>",
        chat_template=form.template,
    )
