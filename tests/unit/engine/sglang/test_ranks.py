"""The numbers of GPUs that can share a model, by what SGLang 0.5.20 asserts of its layers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.sglang import args, ranks
from app.engine.sglang.args import BUILTIN_MODEL, SGLangOptions, with_ranks
from app.engine.sglang.platform import prepare_process
from app.settings import SettingsError

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def dense(heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """The sizes of a dense model that nothing but its heads limits."""
    sizes = {"hidden_size": heads * 128, "intermediate_size": 128 * 840, "vocab_size": 64 * 840}
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, **sizes, **more}


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "Llama 3 70B": (dense(64, 8), {}, [1, 2, 4, 8]),
    "Qwen2.5 7B": (dense(28, 4), {}, [1, 2, 4]),
    "heads without groups": (dense(28, 28), {}, [1, 2, 4, 7]),
    "one KV head for all": (dense(48, 48, multi_query=True), {}, [1, 2, 3, 4, 6, 8]),
    "KV heads that repeat": (dense(64, 2), {}, [1, 2, 4, 8]),
    "KV heads that do not repeat": (dense(24, 3), {}, [1, 3, 6]),
    "a vocabulary of 152064": (dense(28, 28, vocab_size=152_064), {}, [1, 2, 4]),
    "an odd feed-forward": (dense(64, 8, intermediate_size=3420), {}, [1, 2, 4]),
    "below text_config": ({"vision_config": {"num_heads": 16}, "text_config": dense(28, 4)}, {}, [1, 2, 4]),
    "below thinker_config": ({"thinker_config": {"text_config": dense(28, 4)}}, {}, [1, 2, 4]),
    "MLA": (dense(128, 1, kv_lora_rank=512), {}, [1, 2, 4, 8]),
    "linear attention": (dense(16, 2, linear_num_key_heads=4, linear_num_value_heads=8), {}, [1, 2, 4]),
    "sliding windows": (dense(16, 8, swa_num_key_value_heads=4), {}, [1, 2, 4, 8]),
    "Qwen3 30B-A3B in FP8": (
        dense(32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768, quantization_config=FP8),
        {},
        [1, 2],
    ),
    "the same by expert groups": (
        dense(32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768, quantization_config=FP8),
        {"ep_size": 4},
        [4, 8],
    ),
    "experts apart": (
        dense(32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768, quantization_config=FP8),
        {"moe_a2a_backend": "deepep"},
        [1, 2, 4, 8],
    ),
    "blocks of KV": (dense(32, 8, head_dim=64, quantization_config=FP8), {}, [1, 2, 4]),
    "attention kept": (
        dense(32, 8, head_dim=64, quantization_config={**FP8, "modules_to_not_convert": ["self_attn"]}),
        {},
        [1, 2, 4, 8],
    ),
    "AWQ": (
        dense(
            32, 8, intermediate_size=11_008, quantization_config={"quant_method": "awq", "group_size": 128}
        ),
        {},
        [1, 2],
    ),
    "attention in replicas": (dense(28, 4), {"enable_dp_attention": True, "dp_size": 2}, [2, 4, 8]),
    "two replicas": (dense(64, 8), {"dp_size": 2}, [1, 2, 4]),
    "two stages": (dense(64, 8), {"pp_size": 2}, [1, 2, 4]),
    "two nodes": (dense(64, 8), {"nnodes": 2}, [2, 4, 8, 16]),
    "every second GPU": (dense(64, 8), {"gpu_id_step": 2}, [1, 2, 4]),
    "the last two GPUs": (dense(64, 8), {"base_gpu_id": 6}, [1, 2]),
}


def config_of(sizes: dict[str, Any]) -> Any:
    """The configuration as its file would have it."""
    return json.loads(json.dumps(sizes), object_hook=lambda entries: SimpleNamespace(**entries))


@pytest.mark.parametrize(("sizes", "arguments", "numbers"), MODELS.values(), ids=MODELS)
def test_the_numbers_that_work_on_eight_gpus(
    sizes: dict[str, Any], arguments: dict[str, Any], numbers: list[int]
) -> None:
    """0 takes the largest of them; for each other one there is a reason in words."""
    config = config_of(sizes)
    assert ranks.working(config, arguments, ranks.largest(arguments, 8)) == numbers
    assert ranks.choose(config, arguments, 0, 8, "tp") == numbers[-1]
    for tp in {3, 5, 6, 7, 8} - {*numbers}:
        with pytest.raises(
            SettingsError, match=rf"^tp: {tp} GPUs cannot share the model, because \w.*; tp can"
        ):
            ranks.choose(config, arguments, tp, 8, "tp")


def test_no_number_works() -> None:
    """Replicas for which there are no GPUs are said, as nothing else can be."""
    with pytest.raises(SettingsError, match="no number works"):
        ranks.choose(config_of(dense(64, 8)), {"dp_size": 16}, 0, 8, "tp")


def test_without_a_gpu_ranks_are_shares_of_the_cores() -> None:
    """One is taken, and as many may be asked for as the heads allow."""
    config = ranks.config_of(BUILTIN_MODEL)
    assert ranks.choose(config, {"pp_size": 2}, 4, 0, "tp") == 4
    assert [ranks.choose(config, {}, asked, 0, "tp") for asked in (0, 2, 4)] == [1, 2, 4]
    with pytest.raises(
        SettingsError, match="its 4 attention heads cannot be divided by 8; tp can be 1, 2, 4"
    ):
        ranks.choose(config, {}, 8, 0, "tp")


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sees eight GPUs."""
    prepare_process()
    monkeypatch.setattr(args, "visible_devices", lambda: 8)


@pytest.mark.sglang
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("options", "tp"),
    [
        (SGLangOptions(tp=0), 4),
        (SGLangOptions(tp=2), 2),
        (SGLangOptions(model=str(BUILTIN_MODEL), table="small", server_args={"tp_size": 0}), 4),
        (SGLangOptions(model=str(BUILTIN_MODEL), table="guard"), 1),
    ],
    ids=["all", "two", "a child", "a child by default"],
)
def test_the_ranks_of_the_built_in_model_on_eight_gpus(
    eight_gpus: None, options: SGLangOptions, tp: int
) -> None:
    """SGLang's own reading of the model's files gives the same numbers; `tp_size` is not passed twice."""
    settled = with_ranks(options)
    assert (settled.tp, settled.server_args) == (tp, {})


@pytest.mark.sglang
@pytest.mark.timeout(200)
def test_a_child_s_impossible_number_names_its_table(eight_gpus: None) -> None:
    """The message says which setting it is."""
    options = SGLangOptions(model=str(BUILTIN_MODEL), table="small", server_args={"tp_size": 8})
    with pytest.raises(
        SettingsError, match=r"^\[engine.small\] tp_size: 8 GPUs .*; \[engine.small\] tp_size can"
    ):
        with_ranks(options)


@pytest.mark.sglang
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")  # of what SGLang imports
def test_what_sglang_refuses_is_a_settings_error() -> None:
    """An assertion without words in SGLang's own checks is quoted by its line."""
    prepare_process()
    from app.engine.sglang.launch import resolved_args

    options = SGLangOptions(server_args={"enable_dp_attention": True, "dp_size": 3})
    with pytest.raises(
        SettingsError, match=r"^\[engine.sglang\] dp_size: SGLang refuses it: it requires cfg.tp_size % cfg"
    ):
        resolved_args(options)


def test_the_rules_are_of_the_pinned_sglang() -> None:
    """What the rules are taken from stands in SGLang's source: a new version is read again."""
    import importlib.util

    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0]) / "srt"
    quoted = {
        "models/llama.py": (
            "assert self.total_num_heads % tp_size == 0",
            "tp_size % self.total_num_kv_heads",
        ),
        "layers/linear.py": ("divide(self.total_num_heads, tp_size)",),
        "layers/vocab_parallel_embedding.py": (f"DEFAULT_VOCAB_PADDING_SIZE = {ranks.VOCABULARY_PADDING}",),
        "model_executor/model_runner_components/moe_ep_setup.py": ("// moe_tp_size) % weight_block_size_n",),
        "layers/quantization/fp8.py": ("input_size_per_partition % block_k != 0",),
        "layers/quantization/awq/schemes/awq_linear.py": ("% self.quant_config.group_size != 0",),
        "configs/model_config.py": tuple(f'"{name}",' for name in ranks.KV_HEADS),
    }
    for file, lines in quoted.items():
        text = (source / file).read_text("utf-8")
        assert [line for line in lines if line not in text] == []
