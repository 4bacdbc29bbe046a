"""The built-in model's tokenizer: byte-level BPE, made from the corpus, saved in transformers' format.

Every newline is a token of its own, so a rendered conversation extends the rendering of its earlier turns
token for token, whatever the next turn begins with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
# Not "special": they must survive `skip_special_tokens`, because the tool-call parser reads them in the text.
MARKUP = ("<tool_call>", "</tool_call>", "<tools>", "</tools>", "<tool_response>", "</tool_response>")
_SPLIT = r"\n|[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens, special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            *(AddedToken(token, special=True, normalized=False) for token in SPECIAL),
            *(AddedToken(token, special=False, normalized=False) for token in MARKUP),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; the chat template is a file of its own beside them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    saved = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for added in saved["added_tokens"]:
        added["special"] = added["content"] in SPECIAL
    (folder / "tokenizer.json").write_text(json.dumps(saved, ensure_ascii=False, indent=0) + "\n", "utf-8")
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": max_positions,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
