"""Whatever of a request reaches the rendered prompt has been read by the prompt screen.

Requests are drawn from the table of parameters and from the fields of SGLang's own models, with a canary of
its own in each string and each key, and rendered by SGLang's own conversion with several chat templates. So
a place that a new version of SGLang adds is tried without anybody naming it.
"""

from __future__ import annotations

import copy
import json
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import jinja2.meta
import orjson
import pydantic
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from app.api.schema.messages import ROLES
from app.api.schema.parameters import PARAMETERS
from app.engine.http.model import Facts
from app.safety.guard.reading import turns_for
from app.safety.text.escapes import unescape
from app.safety.text.turns import conversation_of, read_request

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("default")]

BUILTIN = Path(__file__).parents[2] / "app" / "engine" / "builtin"
EVERYTHING = """\
{{ messages | tojson }}
{%- for value in [tools, documents, enable_thinking, thinking, reasoning_effort, date_string, custom] %}
{{ value | default('') | tojson }}
{%- endfor %}
"""
"""Writes all that a template is given."""
CHATTY = """\
{%- for message in messages %}
<|im_start|>{{ message.role }}{{ ' ' + message.name if message.name }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part.text or part.name or part.type }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
[{{ call.id }}] {{ call.function.name }}(
{%- for k, v in (call.function.arguments or {}).items() %}{{ k }}={{ v }},{% endfor %})
{%- endfor %}{{ message.tool_call_id }}<|im_end|>
{%- endfor %}
{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}
{%- set schema = tool.function.parameters or {} %}
{%- if schema.properties is mapping %}
{%- for k, v in schema.properties.items() %} {{ k }} {{ v }}{% endfor %}
{%- endif %}
{%- endfor %}{{ date_string }}{{ custom }}
"""
"""As Llama's and Qwen's do: parts of a content in a loop, calls and schemas piece by piece."""
TEMPLATES = {
    "builtin": (BUILTIN / "chat_template.jinja").read_text(),
    "everything": EVERYTHING,
    "chatty": CHATTY,
}
SCHEMA_WORDS = (
    "type",
    "properties",
    "enum",
    "const",
    "default",
    "title",
    "examples",
    "required",
    "$defs",
    "x",
)


class Draws:
    """Draws JSON values of SGLang's types, with a canary of its own in each string."""

    def __init__(self, data: st.DataObject, variables: list[str]) -> None:
        self._draw: Callable[[st.SearchStrategy[Any]], Any] = data.draw
        self._variables = variables
        self.canaries: list[str] = []

    def canary(self) -> str:
        """A word that stands nowhere else, and that JSON may write with an escape."""
        self.canaries.append(f"zq{len(self.canaries)}éx")
        return self.canaries[-1]

    def request(self) -> dict[str, Any]:
        """A request of every parameter that takes text."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        body: dict[str, Any] = {}
        for name, parameter in PARAMETERS.items():
            takes_text = parameter.to_engine and {str, list, dict, bool} & set(parameter.kinds)
            if takes_text and parameter.refusal is None and (name == "messages" or self._flip()):
                value = self.value(ChatCompletionRequest.model_fields[name].annotation, name)
                body |= {} if value is None else {name: value}
        return body

    def value(self, kind: Any, name: str = "") -> Any:
        """A value of a type, for a field of that name."""
        if name == "chat_template_kwargs":
            return {variable: self._variable(variable) for variable in self._variables if self._flip()}
        if name == "arguments":  # of a tool call: SGLang takes JSON of an object only
            text = json.dumps({self.canary(): self.tree(1)}, ensure_ascii=self._flip())
            return text if self._flip() else json.loads(text)
        if get_origin(kind) is None:
            return self.model(kind) if _is_model(kind) else self._scalar(kind)
        return self._composed(get_origin(kind), get_args(kind), name)

    def _composed(self, origin: Any, kinds: Any, name: str) -> Any:
        if origin is Literal:
            return self._draw(st.sampled_from([kind for kind in kinds if name != "role" or kind in ROLES]))
        if origin is dict:
            return {self.canary(): self.value(kinds[1])}
        if origin is list:
            least = 1 if name in ("messages", "tools") else 0
            return [self.value(kinds[0]) for _ in range(self._draw(st.integers(least, 3)))]
        return self.value(kinds[0] if origin is Annotated else self._draw(st.sampled_from(kinds)), name)

    def _scalar(self, kind: Any) -> Any:
        scalars: dict[Any, Callable[[], Any]] = {
            str: self.canary,
            list: lambda: [self.canary()],
            bool: self._flip,
            int: lambda: 1,
            float: lambda: 0.5,
            types.NoneType: lambda: None,
        }
        return scalars[kind]() if kind in scalars else {w: self.tree(2) for w in SCHEMA_WORDS if self._flip()}

    def model(self, kind: type[pydantic.BaseModel]) -> dict[str, Any]:
        """The fields of a model, those that need not be as it comes, until it is valid."""
        kind.model_rebuild()  # types that name one another are resolved when they are first used
        for _ in range(4):
            fields = {
                field.alias or name: self.value(field.annotation, name)
                for name, field in kind.model_fields.items()
                if field.is_required() or self._flip()
            }
            try:
                kind.model_validate(copy.deepcopy(fields))
            except (pydantic.ValidationError, ValueError, TypeError):
                continue
            return fields
        assume(False)
        raise AssertionError

    def _variable(self, name: str) -> Any:
        """A variable of the template; transformers takes documents of one shape only."""
        return [{"title": self.canary(), "text": self.canary()}] if name == "documents" else self.tree(1)

    def tree(self, depth: int) -> Any:
        """Any JSON, canaries for keys and values."""
        kind = self._draw(st.integers(0, 3 if depth else 1))
        if kind == 2:
            return [self.tree(depth - 1), self.canary()]
        if kind == 3:
            return {self.canary(): self.tree(depth - 1), "type": "string"}
        return self.canary()

    def _flip(self) -> bool:
        return bool(self._draw(st.booleans()))


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


@pytest.fixture(scope="module", params=TEMPLATES)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SGLang's conversion with the built-in model's tokenizer and a template; no engine, no weights."""
    from app.engine.sglang.remote import RemoteModelOptions, load_remote_model

    template = tmp_path_factory.mktemp("templates") / f"{request.param}.jinja"
    template.write_text(TEMPLATES[request.param])
    model = {"model_path": str(BUILTIN), "served_model_name": "m"}
    server = {"max_total_num_tokens": 8192, "chat_template": str(template)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_remote_model(Facts(model, server), RemoteModelOptions())
    loaded._chat.template_text, loaded._chat.num_reached = TEMPLATES[request.param], 0
    return loaded._chat


def rendered(chat: Any, body: dict[str, Any]) -> str:
    """The prompt as the model reads it, escapes undone beside it."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    sent = orjson.loads(orjson.dumps(body)) | {"model": "m", "stream": True}
    request = ChatCompletionRequest.model_validate(sent)
    internal, _ = chat._convert_to_internal_request(request)
    tokenizer = chat.tokenizer_manager.tokenizer
    prompt: str = internal.text or tokenizer.decode(internal.input_ids, skip_special_tokens=False)
    return f"{prompt}\n{unescape(prompt)[0]}"


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_the_rendered_prompt_has_the_screen_has_read(chat: Any, data: st.DataObject) -> None:
    """Any canary in the prompt is in a text that the screen reads, and in what a guard model is shown."""
    names = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(chat.template_text))
    draws = Draws(data, sorted({*names, "custom"} - {"messages", "tools", "add_generation_prompt"}))
    body = draws.request()
    try:
        prompt = rendered(chat, body)
    except Exception:  # whatever SGLang refuses reaches no model
        assume(False)
        raise
    turns = read_request(body)
    screened = "\n".join(read.text for read in (*turns.newest, *turns.earlier))
    guarded = "\n".join(turn["content"] for turn in turns_for(conversation_of(body), whole=False))
    reached = [canary for canary in draws.canaries if canary in prompt]
    assert [canary for canary in reached if canary not in screened] == []
    assert [canary for canary in reached if canary not in guarded] == []
    chat.num_reached += len(reached)


def test_the_canaries_do_reach_the_prompt(chat: Any) -> None:
    """Else nothing was tried."""
    assert chat.num_reached > 50
