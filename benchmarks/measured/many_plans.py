"""Many plans of the same model: what ``benchmarks/ranking.py`` runs. Entry points: ``GROUPS``, ``plans_of``.

Variety comes from drawn pins (each forbids about half of what operators may do along an axis), from the meshes that a
number of processes allows, and from planning for links that are faster or slower than the real ones.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ir.errors import PdvError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from pdv.cluster import load_cluster
from pdv.cost.comm import AxisLink
from pdv.cost.compute import ComputeModel
from pdv.frontend import load_program
from pdv.frontend.program import Program
from pdv.plan.derivation import to_steps
from pdv.problem import Pins, Problem
from pdv.rewrite.algebra import RULES
from pdv.search.best import BestPlan
from pdv.search.meshes import search_mesh
from pdv.search.strategies.budget import Budget

CLUSTER = Path(__file__).parents[2] / "examples/clusters/laptop-4.yaml"
HEAVY = ("linear", "conv2d", "attention", "matmul")
# Bytes per second that plans are made for: of shared memory, of gloo on one machine, of a slow network
SPEEDS = (2e10, 4.3e8, 2e7)
SEARCH_S = 6.0
Loss = Literal["cross_entropy", "mean_square"]


@dataclass(frozen=True, slots=True)
class Group:
    """Plans that are compared with each other: one model, batch and number of processes."""

    name: str
    model: str
    processes: int
    loss: Loss


GROUPS = (
    Group("gpt2 on 2", "gpt2", 2, "cross_entropy"),
    Group("mlp on 2", "mlp", 2, "mean_square"),
    Group("vit on 2", "vit", 2, "mean_square"),
    Group("resnet on 2", "resnet", 2, "mean_square"),
    Group("gpt2 on 4", "gpt2", 4, "cross_entropy"),
)


@dataclass(frozen=True)
class Ready:
    """One plan: how it was asked for, and what a replay needs."""

    asked: str
    found: BestPlan
    steps: list[dict[str, Any]]


def module_of(model: str) -> tuple[Any, tuple[Any, ...]]:  # Any: torch is imported when it is called
    """The module and its inputs: the demo's models, wide enough that a step takes tens of milliseconds on a core."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if model == "gpt2":
            from benchmarks.models.language import NO_SPECIAL_TOKENS, gpt2_module

            sizes = {"vocab_size": 2048, "n_positions": 64, "n_embd": 256, "n_layer": 2, "n_head": 8}
            return gpt2_module(sizes | NO_SPECIAL_TOKENS).train(), (torch.randint(1, 2048, (8, 64)),)
        if model == "mlp":
            widths = (512, 1024, 1024, 1024, 256)
            layers = [part for i, o in itertools.pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
            return nn.Sequential(*layers[:-1]).train(), (torch.randn(64, widths[0]),)
        if model == "vit":
            return _vit().train(), (torch.randn(8, 3, 32, 32),)
        assert model == "resnet", model
        return _resnet().train(), (torch.randn(8, 3, 32, 32),)


def _vit() -> Any:
    from transformers.models.vit.configuration_vit import ViTConfig
    from transformers.models.vit.modeling_vit import ViTForImageClassification

    from benchmarks.models.language import NO_ENCODER_DROPOUT, SDPA

    class Vit(ViTForImageClassification):  # type: ignore[no-untyped-call]
        def forward(self, pixel_values: Any) -> Any:
            return super().forward(pixel_values).logits

    sizes = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 768}
    patches = {"image_size": 32, "patch_size": 4, "num_labels": 64}
    return Vit(ViTConfig.from_dict(sizes | patches | NO_ENCODER_DROPOUT | SDPA))


def _resnet() -> Any:
    from transformers.models.resnet.configuration_resnet import ResNetConfig
    from transformers.models.resnet.modeling_resnet import ResNetForImageClassification

    class ResNet(ResNetForImageClassification):  # type: ignore[no-untyped-call]
        def forward(self, pixel_values: Any) -> Any:
            return super().forward(pixel_values).logits

    sizes = {"embedding_size": 64, "hidden_sizes": [128, 256], "depths": [2, 2], "num_labels": 64}
    return ResNet(ResNetConfig.from_dict(sizes))


def program_of(model: str) -> Program:
    """Its graph and weights."""
    return load_program(*module_of(model))


def plans_of(group: Group, program: Program, count: int) -> Iterator[Ready]:
    """Up to ``count`` plans, no two with the same parallel graph; the same ones each time."""
    seen: set[str] = set()
    for draw in range(6 * count):
        if len(seen) == count:
            return
        asked, problem = _drawn(group, program.graph, draw)
        try:
            found = search_mesh(problem, budget=Budget(SEARCH_S))
        except PdvError:
            continue  # the pins left no way
        if found.pcg.digest not in seen:
            seen.add(found.pcg.digest)
            yield Ready(asked, found, to_steps(found.solution))


def problem_of(graph: Graph, mesh: Mesh, pins: Pins | None = None, speed: float = SPEEDS[1]) -> Problem:
    """A mesh of these processes; the mesh and its links decide how values move between operators."""
    cluster = load_cluster(CLUSTER)
    link = replace(cluster.levels[-1].link, bandwidth_bytes_per_s=speed)
    axes = tuple(AxisLink(axis.size, link) for axis in mesh.axes)
    return Problem(graph, mesh, axes, ComputeModel.of(cluster), pins=pins or Pins(), rules=RULES)


def _drawn(group: Group, graph: Graph, draw: int) -> tuple[str, Problem]:
    meshes = [Mesh.of(x=group.processes)] + ([Mesh.of(x=2, y=2)] if group.processes == 4 else [])
    mesh, speed = meshes[draw % len(meshes)], SPEEDS[draw % len(SPEEDS)]
    if draw < len(SPEEDS):
        return f"free, {mesh}, {speed:.0e} B/s", problem_of(graph, mesh, None, speed)
    pins = DrawnPins(draw)
    return f"drawn {draw}, {mesh}, {speed:.0e} B/s", problem_of(graph, mesh, pins.pins, speed)


@dataclass(frozen=True)
class DrawnPins:
    """Forbids a drawn half of the splits of each kind of operator along each axis, never all of them."""

    seed: int

    @property
    def pins(self) -> Pins:
        """As predicates."""
        regather: Literal["free", "always", "never"] = ("free", "always", "never")[self.seed % 3]
        return Pins(self.allows, regather=regather, name=f"drawn {self.seed}")

    def allows(self, node: Node, axis: str, split: Split) -> bool:
        """Whether an operator may run so; replicated heavy work is allowed to every fourth draw."""
        if split.label == "none":
            return node.op.name not in HEAVY or self.seed % 4 == 0 or not self._any(node, axis)
        return self._drawn(node, axis, split.label)

    def _any(self, node: Node, axis: str) -> bool:
        return any(
            self._drawn(node, axis, split.label) for split in node.op.splits(node.loops) if split.loop is not None
        )

    def _drawn(self, node: Node, axis: str, label: str) -> bool:
        text = f"{self.seed} {node.op.name} {axis} {label}"
        return hashlib.sha256(text.encode()).digest()[0] % 2 == 0
