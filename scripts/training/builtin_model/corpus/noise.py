"""What people do to a question: asides, case, lost marks, typing errors, dropped words."""

from __future__ import annotations

from random import Random

from scripts.training.builtin_model.corpus.intents import Wordings, draw_aside

_NEIGHBOURS = {
    "a": "sqz", "b": "vn", "c": "xv", "d": "sfe", "e": "wrd", "f": "dgr", "g": "fht", "h": "gjy", "i": "uok",
    "j": "hku", "k": "jli", "l": "ko", "m": "n", "n": "bm", "o": "ipl", "p": "ol", "q": "wa", "r": "etf",
    "s": "adw", "t": "ryg", "u": "yij", "v": "cb", "w": "qes", "x": "zc", "y": "tuh", "z": "xa",
}  # fmt: skip
_SHORTHAND = {
    "you": "u",
    "are": "r",
    "your": "ur",
    "what's": "whats",
    "and": "n",
    "to": "2",
    "without": "w/o",
}
_MARKS = "?.!,'"


def roughen(text: str, wordings: Wordings, rng: Random) -> str:
    """The question as somebody might really type it; often unchanged but for its case."""
    if rng.random() < 0.08:
        text = _insert_filler(text, wordings, rng)
    if rng.random() < 0.16:
        text = f"{draw_aside('prefix', wordings, rng)} {text}"
    if rng.random() < 0.1:
        text = f"{text} {draw_aside('suffix', wordings, rng)}"
    if rng.random() < 0.08:
        text = _drop_words(text, rng)
    if rng.random() < 0.15:
        text = _mistype(text, rng)
    if rng.random() < 0.03:
        text = " ".join(_SHORTHAND.get(word, word) for word in text.split(" "))
    return _recase(_remark(text, rng), rng)


def _insert_filler(text: str, wordings: Wordings, rng: Random) -> str:
    words = text.split(" ")
    words.insert(rng.randint(0, len(words)), draw_aside("filler", wordings, rng))
    return " ".join(words)


def _drop_words(text: str, rng: Random) -> str:
    words = text.split(" ")
    if len(words) < 5:
        return text
    return " ".join(word for word in words if rng.random() > 0.1) or text


def _mistype(text: str, rng: Random) -> str:
    words = text.split(" ")
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(words))
        words[place] = _mistype_word(words[place], rng)
    return " ".join(words)


def _mistype_word(word: str, rng: Random) -> str:
    if len(word) < 4 or not word.isalpha():
        return word
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(5)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    if kind == 3:
        return word[:at] + rng.choice(_NEIGHBOURS.get(word[at].lower(), "e")) + word[at + 1 :]
    return word[:at] + rng.choice(_NEIGHBOURS.get(word[at].lower(), "e")) + word[at:]


def _remark(text: str, rng: Random) -> str:
    if rng.random() < 0.3:
        text = text.rstrip("?.!")
    if rng.random() < 0.06:
        text = "".join(letter for letter in text if letter not in _MARKS)
    if rng.random() < 0.05:
        text += rng.choice(("??", "!", "...", " ?", "?!"))
    return text


def _recase(text: str, rng: Random) -> str:
    draw = rng.random()
    if draw < 0.45:
        words = ["I" + word[1:] if word.split("'")[0] == "i" else word for word in text.split(" ")]
        text = " ".join(words)
        return text[:1].upper() + text[1:]
    if draw < 0.55:
        return text[:1].upper() + text[1:]
    if draw < 0.57:
        return text.upper()
    return text if draw < 0.75 else text.lower()
