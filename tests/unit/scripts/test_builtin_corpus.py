"""The built-in model's corpus, tokenizer and template agree with each other."""

import json
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from scripts.training.builtin_model.corpus.dialogues import Dialogue, DialogueSource
from scripts.training.builtin_model.corpus.intents import draw_question, load_wordings
from scripts.training.builtin_model.examples import encode, pieces
from scripts.training.builtin_model.grammar import expand, parse
from scripts.training.builtin_model.measure_dev import load_questions

MODEL = Path(__file__).parents[3] / "app" / "engine" / "builtin"
WORDINGS = load_wordings()


@pytest.fixture(scope="module")
def template() -> jinja2.Template:
    """The chat template, with a `tojson` like that of transformers."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((MODEL / "chat_template.jinja").read_text("utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The committed tokenizer."""
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def _turns(dialogue: Dialogue) -> list[dict[str, str]]:
    tags = ("<tool_response>\n", "\n</tool_response>")
    return [
        {"role": turn.role, "content": turn.content.removeprefix(tags[0]).removesuffix(tags[1])}
        for turn in dialogue.messages
    ]


def test_training_text_is_what_the_template_renders(template: jinja2.Template) -> None:
    """300 drawn conversations, tools among them, are rendered alike by the trainer and the chat template."""
    source = DialogueSource(WORDINGS, seed=11)
    drawn = [source.draw() for _ in range(300)]
    assert any(dialogue.tools for dialogue in drawn)
    for dialogue in drawn:
        rendered = template.render(messages=_turns(dialogue), tools=list(dialogue.tools) or None)
        assert rendered == "".join(text for text, _ in pieces(dialogue))


def test_same_seed_draws_the_same_conversations() -> None:
    """The corpus is a function of its seed, and another seed gives another text."""
    first, again, other = (
        [source.draw() for _ in range(50)]
        for source in (DialogueSource(WORDINGS, seed) for seed in (5, 5, 6))
    )
    assert first == again
    assert first != other


def test_a_rendering_extends_that_of_its_earlier_turns(
    template: jinja2.Template, tokenizer: Tokenizer
) -> None:
    """Token for token, whatever white space an answer or the next turn begins with."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Be kind.\n"}]},
        {"role": "user", "content": "\n\n hello  "},
        {"role": "assistant", "content": "\n  \n<tool_call>\n{}\n</tool_call>\t"},
        {"role": "tool", "content": " 7"},
        {"role": "assistant", "content": "  "},
        {"role": "user", "content": "äöü 你好\r\n"},
    ]
    before: list[int] = []
    for count in range(1, len(turns) + 1):
        asking = turns[count : count + 1] != [] and turns[count]["role"] == "assistant"
        text = template.render(messages=turns[:count], add_generation_prompt=asking)
        ids = tokenizer.encode(text).ids
        assert ids[: len(before)] == before
        before = ids


def test_tool_calls_are_rendered_as_they_were_written(template: jinja2.Template) -> None:
    """A call that comes back in `tool_calls` renders as the text that the model wrote."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}
    said = template.render(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert said == template.render(messages=[{"role": "assistant", "content": text}])


def test_tokenizer_gives_back_any_text(tokenizer: Tokenizer) -> None:
    """Byte-level: every text survives, and the tool markup survives the removal of special tokens."""
    text = "a\n\n b\t\r\n<tool_call>\n{}</tool_call> \u200b 你好 🙂 don't 12345"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode("x<|im_end|>").ids, skip_special_tokens=True) == "x"


def test_only_answers_are_learnt(tokenizer: Tokenizer) -> None:
    """The weighted tokens of a row are its assistant's turns with their end marks, and nothing else."""
    source = DialogueSource(WORDINGS, seed=3)
    for dialogue in (source.draw() for _ in range(50)):
        row = encode(dialogue, tokenizer, 100_000)
        learnt = [token for token, weight in zip(row.ids, row.weights, strict=True) if weight]
        answers = [turn.content + "<|im_end|>" for turn in dialogue.messages if turn.role == "assistant"]
        assert tokenizer.decode(learnt, skip_special_tokens=False) == "".join(answers)


def test_held_out_wordings_are_not_in_the_corpus() -> None:
    """No held-out question can be drawn as it is: none is among 100 drawings of each intent it belongs to."""
    intents = {intent.name: intent for intent in WORDINGS.intents}
    rng = Random(1)
    for question in load_questions():
        for name in question.intents:
            drawn = {draw_question(intents[name], WORDINGS, rng).lower().strip("?.! ") for _ in range(100)}
            assert question.text.lower().strip("?.! ") not in drawn


def test_grammar_expands_every_alternative() -> None:
    """Nested alternatives, slots and escapes give exactly the texts they spell."""
    pattern = parse(r"a[b|c[d|]] \[x\] {s}")
    texts = {expand(pattern, {"s": (parse("1"), parse("2"))}, Random(seed)) for seed in range(200)}
    assert texts == {f"a{middle} [x] {end}" for middle in ("b", "cd", "c") for end in "12"}


@pytest.mark.parametrize("broken", ["a]", "[a", "[a|b", "a|b]"])
def test_grammar_refuses_unbalanced_brackets(broken: str) -> None:
    """A bracket without its partner is an error, not text."""
    with pytest.raises(ValueError, match="bracket"):
        parse(broken)


def test_model_folder_is_small_and_complete() -> None:
    """At most 12 MB in all; context of 8,192 tokens; sizes that tensor parallel 2 divides."""
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 12_000_000
    config = json.loads((MODEL / "config.json").read_text("utf-8"))
    assert config["max_position_embeddings"] >= 8192
    assert config["num_key_value_heads"] % 2 == 0
    assert config["vocab_size"] % 128 == 0
