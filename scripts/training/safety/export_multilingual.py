"""The multilingual encoder's convolutions as an int8 ONNX file, from the weights of its package.

Its weights were published in int8, so little is lost; ONNX Runtime needs a fifth of NumPy's time for them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, checker, helper, numpy_helper, save
from onnxruntime.quantization import QuantType, quantize_dynamic

from app.safety.classifiers.multilingual import WIDTH

BRANCH = 256
"""Numbers of a convolution's output."""
ORDERS = ((2, 0), (3, 1), (5, 2))
"""Pieces that a convolution sees at once, and how many of them lie before its own."""
_OPSET = 17


class _Graph:
    """Nodes and constants, as they are added."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: NDArray[Any]) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def columns(self, tensor: str, start: int, end: int) -> str:
        ends = (self.constant(np.array([number])) for number in (start, end, 1))
        return self.add("Slice", tensor, *ends)

    def linear(self, tensor: str, weight: NDArray[Any], bias: NDArray[Any]) -> str:
        return self.add("Add", self.add("MatMul", tensor, self.constant(weight)), self.constant(bias))


def write(weights: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Write the file: (pieces, WIDTH) vectors, (pieces, 5) places, (windows, pieces) sums to the pooled."""
    graph, epsilon = _Graph(), float(weights["eps"])
    project = np.concatenate([weights[f"proj{n}"] for n, _ in ORDERS], axis=1)
    project_bias, gain, shift = (
        np.concatenate([weights[f"{name}{n}"] for n, _ in ORDERS]) for name in ("proj_b", "ln_g", "ln_b")
    )
    branches = graph.add(
        "LayerNormalization",
        graph.linear("vectors", project, project_bias),
        graph.constant(gain),
        graph.constant(shift),
        epsilon=epsilon,
    )
    outside = graph.constant(np.zeros((1, BRANCH), np.float32))
    read = ["vectors"]
    for number, (order, left) in enumerate(ORDERS):
        seen = graph.columns("around", 2 - left, 2 - left + order)
        flat = graph.constant(np.array([-1, order * BRANCH]))
        values = graph.columns(branches, number * BRANCH, (number + 1) * BRANCH)
        for layer in (1, 2):
            padded = graph.add("Concat", values, outside, axis=0)
            near = graph.add("Reshape", graph.add("Gather", padded, seen, axis=0), flat)
            raw = graph.linear(near, weights[f"w{layer}_{order}"], weights[f"b{layer}_{order}"])
            values = graph.add("Add", graph.add("Relu", raw), values)
        read.append(values)
    features = graph.add(
        "LayerNormalization",
        graph.add("Concat", *read, axis=1),
        graph.constant(weights["ln_g"]),
        graph.constant(weights["ln_b"]),
        epsilon=epsilon,
    )
    graph.nodes.append(helper.make_node("MatMul", ["sums", features], ["pooled"]))
    shapes = {"vectors": ("p", WIDTH), "sums": ("w", "p"), "pooled": ("w", WIDTH + len(ORDERS) * BRANCH)}
    values_of = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()
    }
    around = helper.make_tensor_value_info("around", TensorProto.INT64, ("p", 5))
    made = helper.make_graph(
        graph.nodes,
        "multilingual",
        [values_of["vectors"], around, values_of["sums"]],
        [values_of["pooled"]],
        graph.constants,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=9)
    checker.check_model(model)
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "plain.onnx")
        quantize_dynamic(
            Path(folder) / "plain.onnx",
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
