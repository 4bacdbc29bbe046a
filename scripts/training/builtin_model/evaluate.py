"""Measures the built-in model: how many of the questions a new user asks get the right name and no wrong one.

The table shows neither questions nor answers unless `--show` asks for them: whoever writes the training text
runs this too, and text written with the questions in sight would make the measure worthless.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.training.builtin_model.scoring import Question, Scorer, Verdict, read_questions

MODEL_DIR = Path(__file__).parents[3] / "app" / "engine" / "builtin"
MAX_TOKENS = 160
TIMEOUT_S = 120

Ask = Callable[[str], str]


class CannotAsk(Exception):
    """No answer could be had: no server, no model, or a refusal."""


@dataclass(frozen=True, slots=True)
class Result:
    """One question, its answer and the verdict on it."""

    question: Question
    answer: str
    verdict: Verdict


def main(argv: Sequence[str] | None = None) -> int:
    """Ask every question and print the score. Exit status: 1 under `--min`, 2 when nothing answers."""
    options = _options(argv)
    try:
        results = measure(ask_locally(options.model_dir) if options.local else ask_server(options.base_url))
    except CannotAsk as error:
        print(f"eval_builtin_model: {error}", file=sys.stderr)
        return 2
    print(
        report_json(results, show=options.show) if options.json else report_table(results, show=options.show)
    )
    return 1 if count_right(results) < options.min else 0


def measure(ask: Ask) -> list[Result]:
    """Ask every question once and judge the answers.

    Raises:
        CannotAsk: the server or the model gave no answer.
    """
    scorer = Scorer.of_product()
    results = []
    for question in read_questions():
        answer = ask(question["question"])
        results.append(Result(question, answer, scorer.judge(question, answer)))
    return results


def count_right(results: Sequence[Result]) -> int:
    """Count the right answers."""
    return sum(result.verdict.right for result in results)


def report_table(results: Sequence[Result], *, show: bool) -> str:
    """Give one line per question and the count."""
    lines = [" no  answer  lacks  wrong names"]
    for number, result in enumerate(results, start=1):
        verdict = result.verdict
        mark = "right" if verdict.right else "WRONG"
        lines.append(f"{number:3}  {mark:6}  {len(verdict.missing):5}  {len(verdict.wrong):11}")
        if show:
            lines += [f"     question: {result.question['question']}", f"     answer: {result.answer}"]
            lines += [f"     lacks: {' or '.join(group)}" for group in verdict.missing]
            lines += [f"     wrong: {name}" for name in verdict.wrong]
    return "\n".join([*lines, f"{count_right(results)} of {len(results)}"])


def report_json(results: Sequence[Result], *, show: bool) -> str:
    """Give the score as one JSON object."""
    rows: list[dict[str, Any]] = []
    for number, result in enumerate(results, start=1):
        row: dict[str, Any] = {"number": number, "right": result.verdict.right}
        if show:
            row |= {"question": result.question["question"], "answer": result.answer}
            row |= {"missing": result.verdict.missing, "wrong": result.verdict.wrong}
        rows.append(row)
    return json.dumps(
        {"right": count_right(results), "of": len(results), "questions": rows}, ensure_ascii=False
    )


def ask_server(base_url: str) -> Ask:
    """Ask the first model of a running server, greedily, over its OpenAI routes.

    Raises:
        CannotAsk: the server cannot be reached, refuses, or answers out of shape.
    """
    base_url = base_url.rstrip("/")
    model = _call(f"{base_url}/models", lambda reply: reply["data"][0]["id"])

    def ask(question: str) -> str:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        url = f"{base_url}/chat/completions"
        return _call(url, lambda reply: reply["choices"][0]["message"]["content"] or "", body)

    return ask


def ask_locally(model_dir: Path) -> Ask:
    """Ask the model in a directory without a server, greedily, in float32 on the CPU.

    Raises:
        CannotAsk: the directory holds no model.
    """
    if not (model_dir / "config.json").is_file():
        raise CannotAsk(f"no model in {model_dir}")
    # Heavy, and needed here only: asking a server takes nothing but the standard library.
    import torch

    from app.engine.sglang.platform import prepare_process

    prepare_process()  # transformers imports torchvision, as SGLang does
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def ask(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))

    return ask


def _call(url: str, pick: Callable[[Any], Any], body: dict[str, Any] | None = None) -> str:
    headers = {"Content-Type": "application/json"}
    if api_key := os.environ.get("TOKENRING_API_KEY"):
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return str(pick(json.load(reply)))
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")
        if "content_filter" in reason:
            return ""  # a question that the screens refuse has no right answer
        raise CannotAsk(f"{url} answered {error.code}: {reason[:500]}") from error
    except OSError as error:
        raise CannotAsk(f"{url} cannot be reached: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CannotAsk(f"{url} gave an answer out of shape: {error!r}") from error


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/eval_builtin_model", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the server's OpenAI routes")
    parser.add_argument("--local", action="store_true", help="load the model itself, without a server")
    parser.add_argument("--model-dir", type=Path, default=MODEL_DIR, help="where --local finds the model")
    parser.add_argument("--min", type=int, default=0, metavar="N", help="exit 1 under N right answers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--show", action="store_true", help="show questions and answers (never to the text's writer)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
