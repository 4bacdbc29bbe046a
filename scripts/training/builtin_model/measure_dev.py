"""Measures a model folder on the held-out wordings: does it name what the right intent's answers name?"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from scripts.training.builtin_model.corpus.intents import load_wordings
from scripts.training.builtin_model.export import END_ID
from scripts.training.builtin_model.model import Shape, SmallLlama

QUESTIONS = Path(__file__).parent / "dev_questions.txt"
_NAMES = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class DevQuestion:
    """A wording and the intents whose answers are right."""

    intents: tuple[str, ...]
    text: str


def load_questions(path: Path = QUESTIONS) -> list[DevQuestion]:
    """The held-out wordings."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    parts = [line.partition(": ") for line in lines]
    return [DevQuestion(tuple(intents.split(",")), text) for intents, _, text in parts]


def load_model(folder: Path) -> tuple[SmallLlama, Tokenizer]:
    """The network in float32 and the tokenizer of a model folder."""
    model = SmallLlama(Shape())
    saved = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in saved.items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def greedy(
    model: SmallLlama, tokenizer: Tokenizer, prompts: list[str], max_new_tokens: int = 90
) -> list[str]:
    """Greedy continuations of rendered prompts."""
    return [_continue(model, tokenizer, prompt, max_new_tokens) for prompt in prompts]


def _continue(model: SmallLlama, tokenizer: Tokenizer, prompt: str, max_new_tokens: int) -> str:
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            hidden = model.hidden(torch.tensor([ids]))[0, -1]
            token = int(F.linear(hidden, model.embed_tokens.weight).argmax())
        if token == END_ID:
            break
        ids.append(token)
    text: str = tokenizer.decode(ids[start:], skip_special_tokens=False)
    return text


def render(question: str) -> str:
    """The chat template's rendering of one user turn."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    """Print every wrong answer and the share of right ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    torch.set_num_threads(1)
    model, tokenizer = load_model(folder)
    answers = {intent.name: intent.answers for intent in load_wordings().intents}
    questions = load_questions()
    right = 0
    for question, reply in zip(
        questions, greedy(model, tokenizer, [render(q.text) for q in questions]), strict=True
    ):
        if _is_right(reply, [answer for intent in question.intents for answer in answers[intent]]):
            right += 1
        else:
            print(f"WRONG {question.intents[0]}: {question.text}\n      {reply}")
    print(f"{right} of {len(questions)} right ({right / len(questions):.1%})")


def _is_right(reply: str, answers: list[str]) -> bool:
    """Equal to a right answer, or naming the same things and nothing else."""
    names = set(_NAMES.findall(reply))
    same = any(names == set(_NAMES.findall(answer)) for answer in answers)
    return reply in answers or (bool(names) and same)


if __name__ == "__main__":
    main()
