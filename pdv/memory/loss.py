"""What the loss outside the graph holds: cross-entropy over the last dim of what the program returns.

Emitted programs call ``F.cross_entropy`` (examples/train.py): log-probabilities are kept, and its backward makes two
gradients of their size. Megatron-LM's vocab_parallel_cross_entropy computes in float32: logits, and exponentials that
become the gradient in place. A compiled loss writes nothing of float32, and keeps the logits and a number a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.graph import Node
from pdv.memory.log import Heap, Holder, Storage
from pdv.memory.setting import Setting

LOSS = Holder("loss", "cross_entropy")
FULL_BYTES = 4  # float32


def loss_forward(setting: Setting, heap: Heap, outputs: Sequence[Node]) -> dict[Node, Storage]:
    """By output, what the loss keeps until its backward; nothing where there is none."""
    heap.moment = "the loss"
    kept: dict[Node, Storage] = {}
    if not setting.train:
        return kept
    for node in outputs:
        if node.needs_grad:
            elements = _elements(setting, node)
            if fused(setting, node):
                kept[node] = heap.allocate(elements / node.type.shape[-1] * FULL_BYTES, LOSS)  # a number a row
            elif setting.eager:
                kept[node] = heap.allocate(elements * node.type.dtype.itemsize, LOSS)
            else:
                logits = [heap.allocate(elements * FULL_BYTES, LOSS) for _ in range(1 + _is_cut(setting, node))]
                kept[node] = heap.allocate(elements * FULL_BYTES, LOSS)
                for made in logits:
                    heap.drop(made)
    return kept


def fused(setting: Setting, node: Node) -> bool:
    """Whether one kernel reads logits as they are; rows that vocabulary cuts are summed over devices in between."""
    last = setting.shape(node)[-1:] == node.type.shape[-1:]
    return setting.execution.loss == "fused" and node.type.rank > 0 and last


def loss_backward(setting: Setting, heap: Heap, node: Node, kept: Storage) -> Storage:
    """The gradient of an output; what the loss kept is freed."""
    size = float(_elements(setting, node) * node.type.dtype.itemsize)
    if setting.eager:
        picked = heap.allocate(size, LOSS)  # of the log-probabilities: zero but for the targets
        gradient = heap.allocate(size, LOSS)
        heap.drop(picked)
    elif setting.execution.loss == "float32" and not fused(setting, node):
        wide = _elements(setting, node) * FULL_BYTES
        # of the log-probabilities, and of the logits; of cut ones the sum of both stands beside its product
        made = [heap.allocate(float(wide), LOSS) for _ in range(2 + _is_cut(setting, node))]
        for one in made[:-1]:
            heap.drop(one)
        gradient = heap.allocate(size, LOSS)
        heap.drop(made[-1])
    else:
        gradient = heap.allocate(size, LOSS)
    heap.drop(kept)
    return gradient


def _is_cut(setting: Setting, node: Node) -> bool:
    """Whether rows of logits are cut: then torch's loss in parallel makes one tensor more each way.

    torch/distributed/tensor/parallel/loss.py, ``_log_softmax`` and ``_nll_loss_and_log_softmax_backward``.
    """
    return setting.execution.loss == "float32" and setting.shape(node)[-1:] != node.type.shape[-1:]


def _elements(setting: Setting, node: Node) -> int:
    size = 1
    for extent in setting.shape(node):
        size *= extent
    return size
