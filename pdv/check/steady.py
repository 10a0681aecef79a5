"""Noise of torch's modules that is steady: what they draw is what the IR's evaluation draws (``ir.ops.draws``).

Of dropout and noise the module cannot tell which is of training alone: where a program has both, its masks are noise.
Entry points: ``SteadyNoise``; ``chance`` and ``with_masks_of_noise``, for programs that are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ir.graph import Graph, Node
from ir.ops.draws import normal_of, steady_integers, steady_uniform
from pdv.check.module_run import Undropped
from pdv.frontend import masks
from pdv.frontend.lowering import Lowering
from pdv.frontend.torch.draws import DRAWS, drawn_by, named_arguments


class SteadyNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While this lasts, whatever is drawn at random is made of steady noise between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``func``, and steady noise in place of what it drew."""
        options = kwargs or {}
        if func is torch.ops.aten.rrelu_with_noise.default:
            return _rrelu(**named_arguments(func, args, options))
        found = func(*args, **options)
        if (name := drawn_by(func)) not in DRAWS or not isinstance(found, Tensor):
            return found
        return found.copy_(_made(name, found, named_arguments(func, args, options)))


def _rrelu(self: Tensor, noise: Tensor, lower: float, upper: float, training: bool, **_: Any) -> Tensor:
    """What is negative by slopes of steady noise, which backward reads in ``noise``."""
    slopes = torch.from_numpy(steady_uniform(tuple(self.shape))).to(noise) * (upper - lower) + lower
    if not training:
        slopes.fill_((lower + upper) / 2)
    return self * noise.copy_(torch.where(self > 0, torch.ones_like(noise), slopes))


def _made(name: str, found: Tensor, named: Mapping[str, Any]) -> Tensor:
    """What an operator makes of steady noise, in float64."""
    shape = tuple(found.shape)
    steady = torch.from_numpy(steady_uniform(shape)).to(found.device)
    made: Tensor = steady
    match name.removesuffix("_like"):
        case "randn":
            made = torch.from_numpy(normal_of(steady.numpy()))
        case "normal":
            made = torch.from_numpy(normal_of(steady.numpy())) * named["std"] + named["mean"]
        case "uniform":
            made = steady * (named["to"] - named["from"]) + named["from"]
        case "randint":
            made = torch.from_numpy(steady_integers(steady.numpy(), named.get("low", 0), named["high"]))
        case "exponential":
            made = torch.log1p(-steady) * (-1 / named["lambd"])
        case "bernoulli":
            made = steady < named.get("p", named["self"])
    return made


@contextmanager
def chance(graph: Graph) -> Iterator[None]:
    """While this lasts, a module draws steady noise, and drops nothing where its program drops."""
    with Undropped() if any(map(_drops, graph.nodes)) else nullcontext(), SteadyNoise():
        yield


def with_masks_of_noise(graph: Graph) -> Graph:
    """The same where all that is drawn is dropout, or nothing is; else with dropout made of noise, too."""
    drawn = [node for node in graph.nodes if node.op.draws]
    if all(map(_drops, drawn)) or not any(map(_drops, drawn)):
        return graph
    k = Lowering()
    k.drops_as_noise, k.noises = True, max(node.attr("draw") for node in drawn if not _drops(node))

    def make(node: Node, operands: tuple[Node, ...]) -> Node:
        return masks.dropout(k, operands[0], node.attr("p")) if _drops(node) else k.builder.copy(node, operands)

    return k.builder.rebuild(graph, make)[0]


def _drops(node: Node) -> bool:
    return node.op.draws and bool(node.op.linear)
