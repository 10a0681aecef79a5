"""What is said of losses that no step can take, of gradients of inputs, and of a step that one rank could not take.

Entry points: its functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NODES = 64  # of a graph behind an input, that are looked at


def unknown_weights(parts: Sequence[str]) -> ValueError:
    """Of one number, where other ranks have others."""
    cut = " x ".join(parts)
    return ValueError(
        f"unknown-row-weights: loss_fn returned one number, and the batch is cut over {cut}. Whether it is a sum or a "
        "mean, and what its rows weigh in it (padding does not), is not known. Allowed: a pair (sum, weight), or a "
        "loss of torch itself, such as nn.CrossEntropyLoss(). Return the sum of the losses and the number of rows or "
        'tokens that count; for a plain mean over rows, (loss * rows, rows). Or say reduction="sum", and return a sum.'
    )


def unknown_own_loss(cut: Mapping[str, int]) -> RuntimeError:
    """Of a loss outside of ``train_step``."""
    over = " x ".join(f"{name}={size}" for name, size in cut.items())
    return RuntimeError(
        f"unknown-row-weights: backward from a loss of your own, and the batch is cut over {over}: each rank has the "
        "loss of its own rows, and gradients are added up over the ranks. Whether that loss is a sum or a mean is not "
        'known. Call train_step; or set model.own_loss = "mean" before the forward pass, where each rank takes a mean '
        'over its rows (gradients are averaged, as in DDP), or "sum", where what the ranks have adds up to the loss of '
        "the whole batch."
    )


def input_gradients_apart(shape: Sequence[int], along: str) -> RuntimeError:
    """Of a gradient of an input, of which ranks have parts."""
    return RuntimeError(
        f"input-gradients-apart: the gradient of an input {list(shape)} is another on the ranks along {along}, each of "
        "which has a part of it, and the program does not add up what nobody trains. Allowed: gradients of "
        "parameters. Make what you differentiate by a parameter of the model before you plan it, or plan without an "
        "axis that cuts inside rows."
    )


def warn_of_means(given: Iterable[Any]) -> None:
    """Warn of inputs made of what another model handed out with own_loss "mean", as by a generator to its judge.

    Their gradients are of the loss of all rows, which ``_Handed`` of scaled.py would divide by the ranks. What a
    collective that autograd knows did to them (``torch.distributed.nn.all_gather``) may make up for that.
    """
    ahead: list[Any] = [x.grad_fn for x in given if isinstance(x, Tensor)]  # nodes of autograd, which has no types
    seen = set[Any]()
    while ahead and len(seen) < _NODES:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "_HandedBackward" and getattr(node, "way", None) == "mean":
            warnings.warn(
                'mean-of-parts: an input was made of outputs of a model whose own_loss is "mean". They are rows of one '
                "batch, whose loss all ranks have here, so gradients of that model, divided by the number of ranks, "
                'are too small. Say own_loss = "sum" of it before it is called; "mean" stays right of a loss of its '
                "own rows alone.",
                stacklevel=2,
            )
            return
        if not hasattr(node, "saved_tensors"):  # which functions written in Python have
            ahead += [behind for behind, _ in node.next_functions]


def nothing_trained(why: str) -> RuntimeError:
    """Of a step that has nothing to go backward to."""
    return RuntimeError(
        f"nothing-to-train: {why}. Allowed of train_step: a model of which some parameter trains, gradients on. "
        "Call requires_grad_(True) of what trains; to evaluate, call the model under torch.no_grad()."
    )


def bad_loss(what: str) -> ValueError:
    """Of what ``loss_fn`` returned."""
    return ValueError(
        f"bad-loss: {what}. Allowed of loss_fn: (sum, weight), two scalars of its rows of output and target and of "
        "nothing else that is trained; or a list of such pairs, whose means are added. Return one of these."
    )


def read_inputs(inputs: Any, names: Sequence[str]) -> list[Tensor]:  # Any: a tensor, several, or a mapping
    """The inputs of a step in the program's order.

    Raises:
        ValueError: if they are not as many, of other names, or no tensors.
    """
    wanted = f"This program takes {', '.join(names)}. Pass these, and no others, by their names or in this order."
    if isinstance(inputs, Mapping):
        if inputs.keys() != set(names):
            raise ValueError(f"other-inputs: a mapping of {', '.join(map(str, inputs)) or 'nothing'}. {wanted}")
        given = [inputs[name] for name in names]
    else:
        given = [inputs] if isinstance(inputs, Tensor) or not isinstance(inputs, Iterable) else list(inputs)
    if len(given) != len(names) and all(isinstance(x, Tensor) for x in given):
        raise ValueError(f"other-inputs: {len(given)} of them. {wanted}")
    for name, x in zip(names, given, strict=False):
        if not isinstance(x, Tensor):
            raise ValueError(
                f"other-inputs: {name} is a {type(x).__name__}. Allowed: tensors. Take torch.as_tensor(x). {wanted}"
            )
    return given


def text(x: object) -> str:
    """What ``loss_fn`` returned, in words."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    if isinstance(x, tuple):
        return f"({', '.join(map(text, x))})"
    return f"{x!r}" if isinstance(x, int | float | str | None) else f"a {type(x).__name__}"


# ---- A step that one rank could not take ----


def told(summed: Tensor, count: int, failed: Sequence[Exception]) -> Tensor:
    """So many sums over ranks, behind which stands, if anything, on how many of them ``loss_fn`` ended in an error.

    failed: what it raised here.

    Raises:
        Exception: that. RuntimeError: if it raised elsewhere.
    """
    if len(summed) > count and summed[count]:
        raise failed[0] if failed else failed_elsewhere()
    return summed[:count]


def axes_alike(mesh: Any, batch_axes: Sequence[Any]) -> list[Any]:  # Any: a Mesh or None, and axes
    """Those along which ranks take the loss of the same rows, on a CPU: a host would wait for a GPU."""
    if mesh is None or mesh.device.type != "cpu":
        return []
    return [axis for axis in mesh.axes if axis.size > 1 and axis not in batch_axes]


def learn_of_failures(failed: list[Exception] | None, alike: Sequence[Any]) -> None:
    """Before backward, note in ``failed`` that ``loss_fn`` raised on another of the ranks that have the same rows.

    Else some would go backward alone, into collectives that others take for those of their next step.
    """
    if failed is None:
        return
    told_of = torch.tensor([float(bool(failed))])
    for axis in alike:
        dist.all_reduce(told_of, group=axis.group)
    if told_of and not failed:
        failed.append(failed_elsewhere())


def failed_elsewhere() -> RuntimeError:
    """Of a step whose loss another rank could not take."""
    return RuntimeError(
        "loss-failed: loss_fn ended in an error on another rank, which says which. No rank has gradients of this "
        "step. Let it end the process; or leave the batch out, on all ranks, and go on."
    )
