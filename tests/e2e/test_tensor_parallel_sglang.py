"""Real SGLang on a machine that shows eight GPUs: `tp = 0` takes as many as the model's heads allow.

There are no GPUs here: their count is false, and the ranks are processes on the CPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.engine.sglang.args import BUILTIN_MODEL
from app.engine.sglang.platform import prepare_process
from tests.support.servers import ROOT, ServerProcess, start_process
from tests.support.sse_client import fetch

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

EIGHT_GPUS = "from app.engine.sglang import args\nargs.visible_devices = lambda: 8\n"
"""What Python runs at the start of each process (sitecustomize)."""
HEADS = {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 224}
"""The heads of Qwen2.5 7B."""


@pytest.fixture
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ServerProcess]:
    """`serve` with these flags on a machine that shows eight GPUs."""
    (tmp_path / "sitecustomize.py").write_text(EIGHT_GPUS)
    process = await start_process(tmp_path, *request.param(tmp_path), PYTHONPATH=f"{tmp_path}:{ROOT}")
    yield process
    await process.close()


def of_28_heads(folder: Path) -> list[str]:
    """A random model of 28 heads and 4 KV heads, with the built-in model's tokenizer."""
    import torch

    prepare_process()
    from transformers import LlamaConfig, LlamaForCausalLM

    model = folder / "model"
    shutil.copytree(BUILTIN_MODEL, model)
    sizes = json.loads((model / "config.json").read_text()) | HEADS
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(model)
    return ["--tp", "0", "--model", str(model)]


@pytest.mark.parametrize("server", [of_28_heads], indirect=True)
async def test_tp_0_takes_what_the_heads_allow(server: ServerProcess) -> None:
    """Four of eight GPUs, said in one line with the reason; requests are answered."""
    chosen = await server.logged("tensor_parallel", timeout_s=200)
    assert (chosen["tp"], chosen["gpus"]) == (4, 8)
    assert "attention heads cannot be divided by 8" in chosen["hint"]
    port = await server.ready(timeout_s=400)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    answer = await fetch(port, "POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    assert answer.json()["usage"]["completion_tokens"] in range(1, 5)


@pytest.mark.parametrize("server", [lambda _: ["--tp", "8"]], indirect=True, ids=["8"])
async def test_an_impossible_tp_ends_the_start(server: ServerProcess) -> None:
    """With exit status 78 and a sentence that says which numbers work; doctor says it first."""
    assert await server.exit_status(300) == 78
    why = "tp: 8 GPUs cannot share the model, because its 4 attention heads cannot be divided by 8"
    assert server.noise[-1] == f"tokenring: {why}; tp can be 1, 2, 4.\n"
    assert [line for line in server.noise if line.startswith(f"doctor: tp: {why}")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/srv/models/nothing-here"], "model: there is no folder /srv/models/nothing-here"),
        (["--small-model", "./nothing"], "small_model: there is no folder nothing"),
        (["--safety-guard-model", "~/llama-guard"], "safety_guard_model: there is no folder ~/llama-guard"),
        (["--model", "."], "model: the folder . has no config.json"),
    ],
)
async def test_a_model_that_is_not_there_ends_the_start_at_once(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    """Before SGLang is imported or a hub is asked: the reason names the setting and the folder."""
    process = await start_process(tmp_path, *flags)
    assert await process.exit_status(60) == 78
    assert process.noise[-1].startswith(f"tokenring: {words}")
    assert [line for line in process.noise if line.startswith("doctor: model: ")]
