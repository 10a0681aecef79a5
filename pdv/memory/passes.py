"""One micro-batch in one chunk: what comes in, its segments forward and backward, and what is sent on.

Decides what is recomputed (whole layers, from their inputs) and how long a stage's outputs live. Entry: ``passes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ir.graph import Node
from ir.memory.layout import fresh
from pdv.memory.hosting import Hosting
from pdv.memory.log import Heap, Holder, Log, Storage
from pdv.memory.loss import loss_backward, loss_forward
from pdv.memory.setting import Setting, of_weights
from pdv.memory.state import Gathered, gathered
from pdv.memory.units import GATHERED
from pdv.memory.walk import Value, Walk
from pdv.problem.recomputation import HOSTED, SELECTIVE, WHOLE, kept_operators, runs_again
from pdv.problem.workload import IN_HALVES


@dataclass(frozen=True)
class Passes:
    """Changes of memory of one micro-batch in one chunk; ``later``: backward where gradients are there already.

    ``waiting``: bytes that gradients of weights take which are left for later, from one half of backward to the other.
    ``on_host``: bytes of the host between forward and backward.
    """

    forward: Log
    backward: Log
    later: Log
    waiting: float = 0.0
    on_host: float = 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes that run one after the other; ``recomputed``: only what they read from outside is kept.

    ``hosted``: what is kept is in the host's memory between forward and backward.
    """

    nodes: tuple[Node, ...]
    recomputed: bool = False
    hosted: bool = False


def passes(setting: Setting, number: int, heap: Heap, *, twice: bool, on_gpu: bool = False) -> Passes:
    """Forward and backward of one micro-batch in a chunk; ``twice``: and of a second one."""
    walk = Walk(setting, setting.chunks[number], heap, on_gpu)
    forward, backward, on_host = _pass(walk, number)
    later = _pass(walk, number)[1] if twice else backward
    return Passes(forward, backward, later, _waiting(setting, number), on_host)


def _waiting(setting: Setting, number: int) -> float:
    """What products were made of and the gradients of their results, of those whose weights' gradients wait."""
    if setting.workload.execution.order not in IN_HALVES:
        return 0.0
    products = [node for node in setting.chunks[number] if node.op.weight_waits and sum(node.wanted) == 2]
    return float(sum(map(setting.num_bytes, dict.fromkeys([*(node.operands[0] for node in products), *products]))))


def _pass(walk: Walk, number: int) -> tuple[Log, Log, float]:
    """Logs of forward and of backward, and bytes of the host in between."""
    setting, heap = walk.setting, walk.heap
    heap.log = forward = Log()
    inside = set(walk.chunk)
    walk.units.begin()
    walk.waiting = Counter(x for node in walk.chunk for x in node.operands if not x.is_leaf and not of_weights(x))
    received = [x for x in dict.fromkeys(x for node in walk.chunk for x in node.operands) if walk.waiting[x]]
    heap.moment = "receives"
    units = gathered(setting, [number]) if setting.shards_whole else Gathered(0.0)
    layers = heap.allocate(units.forward, GATHERED)
    for value in (x for x in received if x not in inside):
        size = setting.num_bytes(value)
        walk.values[value] = Value(heap.allocate(size, Holder("pipeline")), fresh(setting.shape(value)))
    users = setting.workload.pcg.users
    returned = {node for _, node in setting.workload.pcg.outputs if node in inside}
    sent = [x for x in walk.chunk if x in returned or any(u not in inside and not u.is_leaf for u in users[x])]
    for value in sent:
        walk.waiting[value] += 1
    segments = segments_of(setting, walk.chunk)
    hosting = Hosting(heap, on_gpu=walk.on_gpu)
    inputs = _forward(walk, segments, hosting)
    heap.drop(layers)
    layers = heap.allocate(units.loss if setting.train else 0.0, GATHERED)
    kept = loss_forward(setting, heap, [x for x in sent if x in returned])
    # a stage's outputs are held until their backward, as autograd's roots (torch.distributed.pipelining, DeepSpeed)
    roots = [heap.keep(walk.values[x].storage) for x in sent if x not in returned and x.needs_grad and setting.train]
    for value in sent:
        walk.waiting[value] -= 1
        if not walk.waiting[value]:
            walk.forget(value)
    if not setting.train or setting.execution.passes > 1:
        walk.units.let_go()  # the next forward pass does
    hosting.let_go(0)
    heap.log = backward = Log()
    if setting.train:
        for value in sent:
            if value.needs_grad:
                walk.grads[value] = _arriving(walk, value, kept)
        walk.units.turn()
        _backward(walk, segments, inputs, units, layers, hosting)
    walk.units.finish()
    walk.units.let_go()
    for storage in roots:
        heap.drop(storage)
    return forward, backward, hosting.on_host


def _forward(walk: Walk, segments: Sequence[Segment], hosting: Hosting) -> list[list[Storage]]:
    """All segments; what those keep that run again."""
    inputs: list[list[Storage]] = []
    for place, segment in enumerate(segments):
        inputs.append(_inputs(walk, segment) if segment.recomputed else [])
        if segment.hosted:
            hosting.let_go(1)
        walk.run(segment.nodes, keep=not segment.recomputed)
        inputs[-1] += _kept(walk, segment)
        if segment.hosted:
            saved = [walk.saved[node] for node in segment.nodes if node in walk.saved]
            hosting.send(place, [inputs[-1]] if segment.recomputed else saved)
    return inputs


def _arriving(walk: Walk, value: Node, kept: dict[Node, Storage]) -> Storage:
    """The gradient of what a chunk gives: from the loss, or from the next chunk."""
    walk.heap.moment = "backward of the loss" if value in kept else "receives a gradient"
    if value in kept:
        return loss_backward(walk.setting, walk.heap, value, kept[value])
    size = walk.setting.num_bytes(value)
    return walk.heap.allocate(size, Holder("pipeline"))


def _backward(
    walk: Walk,
    segments: Sequence[Segment],
    inputs: Sequence[list[Storage]],
    units: Gathered,
    last: Storage,
    hosting: Hosting,
) -> None:
    """Backward of all segments, with the forward of each that is run again; from the last layer on with its units."""
    at_work: list[Storage] = []
    for place in reversed(range(len(segments))):
        segment, held = segments[place], inputs[place]
        if not at_work and (segment.recomputed or len(segments) == 1):
            walk.heap.drop(last)
            at_work.append(walk.heap.allocate(units.backward, GATHERED))
            at_work.append(walk.heap.allocate(units.outermost, Holder("gradients")))
        hosting.fetch(place)
        if segment.recomputed:
            _again(walk, segment)
        walk.run_backward(segment.nodes)
        for storage in held:
            walk.heap.drop(storage)
        hosting.forget(place)
    for storage in at_work:
        walk.heap.drop(storage)
    walk.heap.moment = "sends its gradients"
    for grad in walk.grads.values():  # of what came from another chunk
        walk.heap.drop(grad)
    walk.grads.clear()


def segments_of(setting: Setting, nodes: Sequence[Node]) -> list[Segment]:
    """Runs of nodes of one layer; in between what belongs to none. One segment, if nothing is recomputed."""
    recompute = setting.execution.recompute
    if recompute not in {*WHOLE, *SELECTIVE, *HOSTED} or not setting.train:
        return [Segment(tuple(nodes))]
    runs: list[tuple[int | None, list[Node]]] = []
    for node in nodes:
        layer = setting.layer(node)
        if layer is None and not node.needs_grad and runs:
            layer = runs[-1][0]
        if not runs or runs[-1][0] != layer:
            runs.append((layer, []))
        runs[-1][1].append(node)
    again = {layer for layer, _ in runs if layer is not None and runs_again(layer, recompute) and recompute != "hosted"}
    hosted = recompute in HOSTED
    return [Segment(tuple(run), layer in again, hosted and layer is not None) for layer, run in runs]


def _inputs(walk: Walk, segment: Segment) -> list[Storage]:
    """What a recomputed segment reads from outside, kept."""
    inside = set(segment.nodes)
    read = dict.fromkeys(x for node in segment.nodes for x in node.operands)
    outside = [x for x in read if x not in inside and x in walk.values]
    return [walk.heap.keep(walk.values[x].storage) for x in outside]


def _kept(walk: Walk, segment: Segment) -> list[Storage]:
    """What selective recomputation by operator keeps of a segment beside what it reads."""
    recompute = walk.setting.execution.recompute
    if not segment.recomputed or recompute not in SELECTIVE or recompute == "offload":
        return []
    nodes = [segment.nodes[place] for place in sorted(kept_operators([node.op for node in segment.nodes], recompute))]
    return [walk.heap.allocate(walk.setting.num_bytes(x), Holder("activations", x.op.name)) for x in nodes]


def _again(walk: Walk, segment: Segment) -> None:
    """Forward of a segment once more, from its inputs, which are held."""
    inside = set(segment.nodes)
    reads = Counter(x for node in segment.nodes for x in node.operands if not x.is_leaf and not of_weights(x))
    walk.waiting = reads
    for value in reads:
        if value not in inside:
            walk.waiting[value] += 1  # it is not freed here
            shape = walk.setting.shape(value)
            walk.values[value] = Value(Storage(0.0, Holder("activations")), fresh(shape))
    walk.run(segment.nodes, keep=True, again=True)
    walk.values.clear()
