"""Our own Triton kernels as rows: each is a fused subgraph that one kernel runs. Entry point: ``TritonGroup``."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.types import TensorType
from learned_cost.data.kernel import Kernel, Subgraph
from learned_cost.profile.programs.groups import Limits, RowTask
from learned_cost.profile.programs.subgraphs import describe_graph, inputs_of, vector

Build = Callable[[Builder, TensorType, int], tuple[Node, ...]]  # over [rows, width] and another width
Run = Callable[[Sequence[Tensor]], object]


def _bias_gelu(k: Builder, t: TensorType, other: int) -> tuple[Node, ...]:
    x = k.input("x", t)
    return (k.gelu(k.add(x, vector(k, x, "bias")), approximate="tanh"),)


def _add_layer_norm(k: Builder, t: TensorType, other: int) -> tuple[Node, ...]:
    total = k.add(k.input("x", t), k.input("f", t))
    return total, k.layer_norm(total, vector(k, total, "w"), vector(k, total, "b"), eps=1e-5)


def _add_rms_norm(k: Builder, t: TensorType, other: int) -> tuple[Node, ...]:
    total = k.add(k.input("x", t), k.input("f", t))
    return total, k.rms_norm(total, vector(k, total, "w"), eps=1e-5)


def _masked_softmax(k: Builder, t: TensorType, other: int) -> tuple[Node, ...]:
    x = k.scale(k.input("x", TensorType((8, *t.shape), t.dtype)), factor=0.125)
    return (k.softmax(k.add(x, k.input("mask", t)), dim=-1),)


def _linear(activation: str) -> Build:
    def build(k: Builder, t: TensorType, other: int) -> tuple[Node, ...]:
        y = k.linear(k.input("x", t), k.param("w", TensorType((other, t.shape[-1]), t.dtype)))
        y = k.add(y, vector(k, y, "bias"))
        return (k.gelu(y, approximate="tanh") if activation == "gelu" else k.relu(y),)

    return build


# name -> its graph; leaves come in the order in which operators read them
FUSIONS: Mapping[str, Build] = {
    "bias_gelu": _bias_gelu,
    "add_layer_norm": _add_layer_norm,
    "add_rms_norm": _add_rms_norm,
    "masked_softmax": _masked_softmax,
    "linear_gelu": _linear("gelu"),
    "linear_relu": _linear("relu"),
}


def runs() -> Mapping[str, Run]:
    """The kernel of each fusion, over its graph's leaves.

    Raises:
        ImportError: if Triton is not installed.
    """
    from learned_cost.profile.kernels.matmul import linear_act
    from learned_cost.profile.kernels.rowwise import add_norm, bias_gelu, masked_softmax

    return {
        "bias_gelu": lambda x: bias_gelu(x[0], x[1]),
        "add_layer_norm": lambda x: add_norm(x[0], x[1], x[2], x[3], 1e-5),
        "add_rms_norm": lambda x: add_norm(x[0], x[1], x[2], None, 1e-5),
        "masked_softmax": lambda x: masked_softmax(x[0], x[1], 0.125),
        "linear_gelu": lambda x: linear_act(x[0], x[1], x[2], "gelu"),
        "linear_relu": lambda x: linear_act(x[0], x[1], x[2], "relu"),
    }


def fusion(name: str, t: TensorType, other: int = 64) -> Graph:
    """The graph of one of ``FUSIONS`` over ``t``; ``other``: width of a product's result."""
    k = Builder()
    return k.graph({f"out{i}": node for i, node in enumerate(FUSIONS[name](k, t, other))})


@dataclass
class TritonGroup:
    """Our kernels in turn, over random shapes."""

    limits: Limits
    weight: float = 4.0
    name: str = field(default="triton", init=False)
    _turns: int = field(default=0, init=False)

    def turn(self) -> Sequence[RowTask] | None:
        """One kernel at one shape, with warm and with cold caches."""
        name = list(FUSIONS)[self._turns % len(FUSIONS)]
        rng = random.Random(self._turns)
        self._turns += 1
        width = rng.choice((64, 128, 256, 512, 768, 1024, 1536, 2048, 4096, 5120, 8192))
        rows = max(1, min(round(2 ** rng.uniform(0, 14)), (1 << 24) // width))
        t = TensorType((rows, width), rng.choice(self.limits.dtypes))
        graph = fusion(name, t, rng.choice((128, 512, 1024, 4096)))
        what = describe_graph(graph, fused=True, stack="triton")
        setting = self.limits.setting
        if setting.roofline_s(what.flops, what.traffic, what.kernels[0].dtype) > self.limits.seconds:
            return ()

        def prepare(device: torch.device) -> Callable[[], Any]:  # Any: results are dropped
            operands, run = inputs_of(graph, device), runs()[name]
            return lambda: run(operands)

        return [RowTask(what, prepare, name=name), RowTask(what, prepare, "cold", name=name)]

    def learn(self, what: Kernel | Subgraph, surprise: float) -> None:
        """Which kernel is next does not depend on it."""
