"""A drawn program as plain data: the steps of a module, and the plan that it runs under. JSON and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Mode = Literal["train", "infer"]


@dataclass(frozen=True)
class Input:
    """One argument of forward: [batch, *shape], of numbers, or of ids below ``upto``."""

    name: str
    shape: tuple[int, ...]
    upto: int = 0


@dataclass(frozen=True)
class Step:
    """One operation: its name, the values that it reads, and its attributes.

    ``weights`` names another step whose parameters it uses; ``scope`` is the submodule that holds its own.
    """

    id: str
    op: str
    of: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    scope: str = ""
    weights: str = ""


@dataclass(frozen=True)
class ModuleSpec:
    """A module: values are named by inputs and steps. ``seed`` draws its parameters and its data."""

    seed: int
    batch: int
    dtype: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class RunSpec:
    """How a step runs: in so many micro-batches, and in stages.

    ``cuts``: at which of the operators with a gradient, by number, a stage begins that is not the first. ``virtual``:
    stages on each rank of the pipeline. ``offload``: parameters rest in the host's memory.
    """

    micro_batches: int = 1
    cuts: tuple[int, ...] = ()
    order: str = "1f1b"
    virtual: int = 1
    recompute: bool = False
    offload: bool = False

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return (len(self.cuts) + 1) // self.virtual


@dataclass(frozen=True)
class PlanSpec:
    """How a module runs on a mesh (axis sizes, slow to fast), which is that of a stage.

    ``splits``: for each operator of the graph in order, its name and the label of its split along each axis;
    ``storage``: where parameters rest, and whether they are gathered again in backward. Whatever these do not say runs
    and rests whole. ``searched``: the search decides instead.
    """

    mesh: tuple[tuple[str, int], ...]
    mode: Mode = "train"
    searched: bool = False
    splits: tuple[tuple[str, tuple[str, ...]], ...] = ()
    storage: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    run: RunSpec = field(default_factory=RunSpec)

    @property
    def devices(self) -> int:
        """Of the meshes of all stages."""
        count = self.run.ranks
        for _, size in self.mesh:
            count *= size
        return count


@dataclass(frozen=True)
class Program:
    """A module under a plan."""

    module: ModuleSpec
    plan: PlanSpec

    def text(self) -> str:
        """As JSON, the same bytes for equal programs."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @property
    def key(self) -> str:
        """A short name."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:10]

    @classmethod
    def parse(cls, text: str) -> Program:
        """What ``text`` wrote."""
        content = json.loads(text)
        module, plan = content["module"], content["plan"]
        return cls(
            ModuleSpec(
                module["seed"],
                module["batch"],
                module["dtype"],
                tuple(Input(x["name"], tuple(x["shape"]), x["upto"]) for x in module["inputs"]),
                tuple(replace(Step(**step), of=tuple(step["of"])) for step in module["steps"]),
                tuple(module["outputs"]),
            ),
            PlanSpec(
                tuple((name, size) for name, size in plan["mesh"]),
                plan["mode"],
                plan["searched"],
                tuple((op, tuple(labels)) for op, labels in plan["splits"]),
                {name: (sharding, regather) for name, (sharding, regather) in plan["storage"].items()},
                replace(RunSpec(**run), cuts=tuple(run["cuts"])) if (run := plan.get("run")) else RunSpec(),
            ),
        )
