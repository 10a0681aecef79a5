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
from pdv.problem.workload import STALE


@dataclass(frozen=True)
class State:
    """Bytes of a stage that do not come and go, by holder, and what the optimizer's step needs beside them.

    ``flat``: of the latter, what lies in one piece: freed activations cannot give room to it. ``gone``: of all that is
    there, what the optimizer's step does not find: copies of weights for one step, and of their gradients.
    ``on_host``: of the host's memory, besides; of a CPU it is part of ``held``.
    """

    held: Mapping[Holder, float]
    gradients: float
    step: float
    flat: float = 0.0
    gone: float = 0.0
    on_host: float = 0.0


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
    if setting.workload.stages.count > 1 and setting.execution.order in STALE:
        held[Holder("weights", "of the step before")] = sum(sizes[leaf] for leaf in trained)
    gradients = sum(_gradient(setting, leaf) for leaf in trained)
    held[Holder("optimizer")] = sum(_optimizer(setting, leaf) for leaf in trained)
    on_host = sum(_on_host(setting, leaf) for leaf in trained)
    if not setting.eager:
        whole = gathered(setting, chunks)
        made = sum(_gradient(setting, leaf) for leaf in trained if setting.shards_whole and leaf.attr("regather"))
        held[Holder("gradients")] = gradients - made + whole.unsummed
        held[Holder("collectives", "all_gather")] = whole.always
        step = 0.0 if on_host else sum(_cast(setting, leaf) for leaf in trained)
        return State(held, 0.0, step, step if setting.execution.zero else 0.0, on_host=on_host)
    weights = sorted((_elements(setting, leaf) * _own_bytes(setting, leaf) for leaf in trained), reverse=True)
    # torch's foreach AdamW takes the roots of all second moments at once; on a CPU it goes parameter by parameter: the
    # root and the quotient, while the last parameter's quotient is still there (torch/optim/adam.py).
    step = sum(weights) if on_gpu else sum(weights[:1]) + sum(weights[:2])
    if on_host and on_gpu:
        step = 0.0
    elif on_host:  # gradients are not copied there
        held[Holder("optimizer")] = on_host - gradients
    copies = _copies(setting, chunks)
    held[Holder("collectives", "all_gather")] = sum(map(setting.num_bytes, copies))
    more = sum(_added(setting, copy) - _gradient(setting, copy.operands[0]) for copy in copies)
    gone = held[Holder("collectives", "all_gather")] + more
    return State(held, gradients, step, gone=gone, on_host=on_host if on_gpu else 0.0)


def _copies(setting: Setting, chunks: Iterable[int]) -> list[Node]:
    """Of weights, gathered once a step."""
    read = (step for chunk in chunks for node in setting.chunks[chunk] for x in node.operands for step in chain(x))
    return [step for step in dict.fromkeys(read) if step.op.kind == "parallel" and setting.kept_copy(step)]


def _added(setting: Setting, copy: Node) -> float:
    """Bytes of a copy's gradient, added up over micro-batches."""
    return setting.num_bytes(copy) * setting.gradient_share(copy.operands[0])


def _resting(setting: Setting, leaf: Node) -> float:
    """The part of a weight's bytes that rests, where its products read it in a narrow format; not of what is gathered.

    A gathered one rests as the optimizer's own copy, which is cast when it is sent.
    """
    own = setting.eager and setting.execution.precision.masters_here
    if (own or setting.shards_whole) and leaf.is_param and leaf.attr("regather"):
        return 0.0
    if own and leaf.is_param and any(map(setting.kept_copy, setting.workload.pcg.users[leaf])):
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


@dataclass(frozen=True)
class Gathered:
    """Bytes of weights that rest cut, where a framework has them whole, a unit at a time: a layer, and all else.

    Zhao et al., "PyTorch FSDP", VLDB'23, section 3.3: a unit is gathered at once, and its gradients are summed when all
    of it is there. What is in no layer is the outermost unit, gathered as long as a micro-batch runs. FSDP2
    (torch/distributed/fsdp/_fully_shard, ``_fsdp_param_group.py``): a unit's gradients, as backward made them, stand
    beside a copy in the type of their sum.

    Attributes:
        always: there all the time.
        unsummed: gradients of whole weights that are there all the time.
        forward: beside it while layers run, and ``loss`` of it behind them: the last layer stays for its backward.
        backward: as forward, with gradients.
        outermost: gradients of the outermost unit, in backward.
    """

    always: float
    unsummed: float = 0.0
    forward: float = 0.0
    loss: float = 0.0
    backward: float = 0.0
    outermost: float = 0.0


def gathered(setting: Setting, chunks: Iterable[int]) -> Gathered:
    """Of the stage that has these chunks."""
    sent: dict[int | None, dict[Node, float]] = {}
    whole: dict[int | None, dict[Node, float]] = {}
    summed = 0.0
    for chunk in chunks:
        for node in setting.chunks[chunk]:
            for operand in node.operands:
                if gathered_for_use(operand):
                    layer, param = setting.layer(node), chain(operand)[0]
                    sent.setdefault(layer, {})[param] = setting.gathered_bytes(operand)
                    whole.setdefault(layer, {})[param] = setting.num_bytes(operand)
                    summed = setting.gradient_share(param)
    outermost, of_outermost = (sum(found.pop(None, {}).values()) for found in (sent, whole))
    layers, of_layers = ([sum(sizes.values()) for sizes in found.values()] for found in (sent, whole))
    most, of_most = max(layers, default=0.0), max(of_layers, default=0.0)
    ahead = setting.execution.overlap.gathers
    if setting.keeps_gathered:
        return Gathered(outermost + sum(layers), unsummed=summed * (of_outermost + sum(of_layers)))
    if not setting.shards_whole:
        return Gathered(outermost + of_outermost + most * (ahead + 1) + of_most)
    at_work = most * (ahead + 1)
    return Gathered(outermost, 0.0, at_work, most, at_work + of_most * (1 + summed), of_outermost)


def _elements(setting: Setting, param: Node) -> int:
    return math.prod(setting.shape(param))


def _cut(setting: Setting, param: Node) -> int:
    """How many ways ZeRO cuts what rests whole along the data axes."""
    mesh = setting.workload.problem.mesh
    sharding = setting.shardings[param]
    names = setting.execution.data_axes
    whole = [setting.size(name) for name in names if not isinstance(sharding[mesh.index(name)], Shard)]
    return math.prod(whole)


def _on_host(setting: Setting, param: Node) -> float:
    each = setting.execution.precision.host_bytes(param.type.dtype.itemsize)
    return _elements(setting, param) * each / (_cut(setting, param) if setting.execution.zero >= 1 else 1)


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
