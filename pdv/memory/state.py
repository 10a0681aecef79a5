"""What a stage holds all the time: weights, buffers, inputs, and what training keeps of each parameter.

Sources: Micikevicius et al., ICLR'18 (copies of mixed precision); Rajbhandari et al., SC'20, section 3 (ZeRO stages).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ir.graph import Node
from ir.sharding import Shard
from pdv.memory.log import Holder
from pdv.memory.setting import Setting, chain, gathered_for_use


@dataclass(frozen=True)
class State:
    """Bytes of a stage that do not come and go, by holder, and what the optimizer's step needs beside them.

    ``flat``: of the latter, what lies in one piece: freed activations cannot give room to it.
    """

    held: Mapping[Holder, float]
    gradients: float
    step: float
    flat: float = 0.0


def state(setting: Setting, chunks: Iterable[int], *, on_gpu: bool) -> State:
    """Of the stage that has these chunks.

    ``gradients`` are those that backward makes (nothing where they are buffers, which count as held).
    """
    leaves = _leaves(setting, chunks)
    trained = [leaf for leaf in leaves if leaf.is_param and leaf.needs_grad]
    others = [leaf for leaf in leaves if not (leaf.is_param and leaf.needs_grad)]
    sizes = {x: math.prod(setting.shape(x)) * x.type.dtype.itemsize * _resting(setting, x) for x in leaves}
    held = {
        Holder("weights"): sum(sizes[leaf] for leaf in (*trained, *others) if not leaf.is_input),
        Holder("inputs"): sum(sizes[leaf] for leaf in others if leaf.is_input),
    }
    if not setting.train:
        return State(held, 0.0, 0.0)
    gradients = sum(_gradient(setting, leaf) for leaf in trained)
    held[Holder("optimizer")] = sum(_optimizer(setting, leaf) for leaf in trained)
    if not setting.eager:
        held[Holder("gradients")] = gradients
        held[Holder("collectives", "all_gather")] = _gather(setting, chunks)
        step = sum(_cast(setting, leaf) for leaf in trained)
        return State(held, 0.0, step, step if setting.execution.zero else 0.0)
    weights = sorted((_elements(setting, leaf) * _own_bytes(setting, leaf) for leaf in trained), reverse=True)
    # torch's foreach AdamW takes the roots of all second moments at once; on a CPU it goes parameter by parameter: the
    # root and the quotient, while the last parameter's quotient is still there (torch/optim/adam.py).
    step = sum(weights) if on_gpu else sum(weights[:1]) + sum(weights[:2])
    return State(held, gradients, step)


def _resting(setting: Setting, leaf: Node) -> float:
    """The part of a weight's bytes that rests, where its products read it in a narrow format; not of what is gathered.

    A gathered one rests as the optimizer's own copy, which is cast when it is sent.
    """
    if setting.eager and setting.execution.precision.master and leaf.is_param and leaf.attr("regather"):
        return 0.0
    chosen = setting.execution.resting
    if chosen is None or not leaf.is_param or leaf.attr("regather") or len(setting.shape(leaf)) < 2:
        return 1.0
    readers = [leaf]
    while readers and all(reader.is_leaf or reader.op.kind == "parallel" for reader in readers):
        readers = [user for reader in readers for user in setting.workload.pcg.users[reader]]
    inside = bool(readers) and all(setting.layer(reader) is not None for reader in readers)
    return chosen.bytes / leaf.type.dtype.itemsize if inside else 1.0


def _leaves(setting: Setting, chunks: Iterable[int]) -> list[Node]:
    """Of what the chunks read, and inputs that the program never reads."""
    found: dict[Node, None] = {}
    for chunk in chunks:
        for node in setting.chunks[chunk]:
            found |= dict.fromkeys(base for operand in node.operands if (base := chain(operand)[0]).is_leaf)
    return list(found)


def _gather(setting: Setting, chunks: Iterable[int]) -> float:
    """Whole layers of weights that rest cut: the one at work, those gathered ahead of it, and one of gradients.

    What is in no layer is the outermost unit: gathered, and its gradients not reduced, as long as a micro-batch runs.
    Zhao et al., "PyTorch FSDP", VLDB'23, section 3.3: a unit is gathered at once, and reduced when all of it is there.
    """
    layers: dict[int | None, dict[Node, float]] = {}
    for chunk in chunks:
        for node in setting.chunks[chunk]:
            for operand in node.operands:
                if gathered_for_use(operand):
                    layers.setdefault(setting.layer(node), {})[chain(operand)[0]] = setting.num_bytes(operand)
    outermost = sum(layers.pop(None, {}).values())
    most = max((sum(sizes.values()) for sizes in layers.values()), default=0.0)
    return 2.0 * outermost + most * (setting.execution.overlap.gathers + 2)


def _elements(setting: Setting, param: Node) -> int:
    return math.prod(setting.shape(param))


def _cut(setting: Setting, param: Node) -> int:
    """How many ways ZeRO cuts what rests whole along the data axes."""
    mesh = setting.workload.problem.mesh
    sharding = setting.shardings[param]
    names = setting.execution.data_axes
    whole = [setting.size(name) for name in names if not isinstance(sharding[mesh.index(name)], Shard)]
    return math.prod(whole)


def _own_bytes(setting: Setting, param: Node) -> int:
    """Of an element of what the optimizer updates."""
    return setting.execution.precision.master or param.type.dtype.itemsize


def _gradient(setting: Setting, param: Node) -> float:
    each = setting.execution.precision.gradient_bytes(param.type.dtype.itemsize)
    return _elements(setting, param) * each / (_cut(setting, param) if setting.execution.zero >= 2 else 1)


def _cast(setting: Setting, param: Node) -> float:
    """Gradients narrower than the optimizer's copy are cast for its step; under ZeRO each rank's share, in one piece.

    DeepSpeed, runtime/zero/stage_1_and_2.py, ``step``; Megatron-LM's Float16OptimizerWithFloat16Params, one by one.
    """
    precision = setting.execution.precision
    if precision.gradient_bytes(param.type.dtype.itemsize) >= precision.master:
        return 0.0
    cut = _cut(setting, param) if setting.execution.zero >= 1 else 1
    return _elements(setting, param) * precision.master / cut


def _optimizer(setting: Setting, param: Node) -> float:
    each = setting.execution.precision.optimizer_bytes(param.type.dtype.itemsize)
    return _elements(setting, param) * each / (_cut(setting, param) if setting.execution.zero >= 1 else 1)
