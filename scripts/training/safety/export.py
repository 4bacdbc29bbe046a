"""The encoder as an int8 ONNX file, matrices and word vectors alike."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

from scripts.training.safety.minilm import MiniLM


def write(model: MiniLM, path: Path) -> None:
    """Export and quantize: weights int8 per channel, activations at run time."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.onnx"
        sample = (torch.randint(1000, 2000, (2, 9)), torch.ones(2, 9))
        axes = {0: "batch", 1: "tokens"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.eval(),
                sample,
                str(plain),
                input_names=["ids", "attention"],
                output_names=["logits"],
                dynamic_axes={"ids": axes, "attention": axes, "logits": {0: "batch"}},
                opset_version=17,
                dynamo=False,
            )
        quantize_dynamic(
            plain,
            path,
            op_types_to_quantize=["MatMul", "Gather"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
