"""The loss of the whole batch, where each rank has its own rows of it. Entry point: ``batch_loss``.

A mean is a sum of losses over a sum of weights, such as the number of tokens that are not padding. Ranks differ in
both, so both are summed over the ranks before one is divided by the other: a mean of the ranks' means is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from functools import reduce as reduce_over
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import functional as F  # noqa: N812

from .kernels.buckets import Sum, guess_weight
from .kernels.refused import bad_loss, learn_of_failures, nothing_trained, text, told, unknown_weights
from .parallel import Axis

if TYPE_CHECKING:
    from .gradients import GradientSums

Term = tuple[Tensor | float, Tensor | float]
"""The sum of some rows' losses, and the sum of their weights."""
LossFn = Callable[[Any, Any], Tensor | Term | Sequence[Term]]
_counts = [1]
"""How many pairs the last ``loss_fn`` returned: as many as others sum, where it ends in an error on this rank."""

# Losses of torch of which every row's share is known, each with its module and the options it may have.
_TORCH_LOSSES: tuple[tuple[Callable[..., Tensor], type[nn.Module], tuple[str, ...]], ...] = (
    (F.cross_entropy, nn.CrossEntropyLoss, ("weight", "ignore_index", "label_smoothing")),
    (F.nll_loss, nn.NLLLoss, ("weight", "ignore_index")),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, ("weight", "pos_weight")),
    (F.binary_cross_entropy, nn.BCELoss, ("weight",)),
    (F.mse_loss, nn.MSELoss, ()),
    (F.l1_loss, nn.L1Loss, ()),
    (F.smooth_l1_loss, nn.SmoothL1Loss, ("beta",)),
    (F.huber_loss, nn.HuberLoss, ("delta",)),
    (F.kl_div, nn.KLDivLoss, ("log_target",)),
    (F.poisson_nll_loss, nn.PoissonNLLLoss, ("log_input", "full", "eps")),
    (F.soft_margin_loss, nn.SoftMarginLoss, ()),
    (F.hinge_embedding_loss, nn.HingeEmbeddingLoss, ("margin",)),
    (F.multi_margin_loss, nn.MultiMarginLoss, ("p", "margin", "weight")),
    (F.multilabel_margin_loss, nn.MultiLabelMarginLoss, ()),
    (F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, ("weight",)),
)
_OF_CLASSES = {F.cross_entropy, F.nll_loss}
_OF_ROWS = {F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss}  # one number each


def batch_loss(
    loss_fn: LossFn,
    output: Any,
    target: Any,
    batch_axes: Sequence[Axis],
    reduction: str,
    weigh: Callable[[Tensor], Tensor] | None = None,
    sums: GradientSums | None = None,
    alike: Sequence[Axis] = (),
    *,
    shows: Callable[[], bool] = bool,
) -> tuple[Tensor, Callable[[], Tensor]]:
    """A rank's share in the loss of the whole batch, to go backward from; and what gives all of it behind that.

    output, target: this rank's rows, cut along ``batch_axes``; reduction: "mean", or "sum" where losses add up; weigh:
    of ``begin_weight``; sums: of the gradients, with which other numbers are summed; alike: as ``batch_terms``; shows:
    see ``sums``, asked where it matters.

    Where ``loss_fn`` ends in an error on one rank, on a CPU, others learn of it, behind backward at the latest.

    Raises:
        ValueError: if what ``loss_fn`` returns does not determine the loss of the whole batch.
        RuntimeError: if ``loss_fn`` raised anything on another rank.
    """
    axes = [axis for axis in batch_axes if axis.size > 1]
    failed: list[Exception] = []
    first = output[0] if isinstance(output, tuple) else output
    can_tell = bool(axes) and first.device.type == "cpu"  # a host would wait for a GPU
    totals = batch_terms(loss_fn, output, target, axes, reduction, 1, failed if can_tell or alike else None, alike)
    if totals.dim() != 2:
        return totals, totals.detach
    if not failed:
        _counts[:] = [totals.size(1)]
    count = 1 if weigh else _counts[0]
    if weigh is None and reduction == "mean" and sums is not None and can_tell and count == 1:
        return guess_weight(sums, totals, axes, failed, shows=shows())
    flags = totals.new_tensor([len(failed)] if can_tell or failed else [])
    losses, weights = (torch.cat([x.expand(count), flags]) for x in totals.detach())
    if reduction == "sum":
        weights = torch.ones_like(weights[:count])
    elif weigh is not None:
        weights = weigh(weights[:count]).to(weights)
    else:
        weights = told(Sum(weights, axes).wait(), count, failed)
    summed = Sum(losses, axes) if sums is None else sums.beside(losses, axes)

    def whole() -> Tensor:
        return (told(summed.wait(), count, failed) / weights).sum()

    return (totals[0] / weights).sum(), whole


def begin_weight(
    loss_fn: LossFn, target: Any, batch_axes: Sequence[Axis], reduction: str
) -> Callable[[Tensor], Tensor] | None:
    """What gives the weights of the whole batch of this rank's, if these need not wait for the forward pass.

    Ranks that wait for one another between forward and backward lose what each is late by.
    """
    axes = [axis for axis in batch_axes if axis.size > 1]
    torch_loss = _torch_loss(loss_fn) if axes and reduction == "mean" else None
    if torch_loss is None:
        return None
    if not _is_of_labels(torch_loss[0], target):  # numbers of elements, of which all ranks have as many
        return lambda weights: weights * math.prod(axis.size for axis in axes)
    try:
        own = _weight_of_labels(target, torch_loss[1])
    except Exception:  # noqa: BLE001  # labels that are none: the loss will say so
        own = target.new_zeros(())
    summed = Sum(own.to(torch.float64), axes)
    return lambda weights: summed.wait()


def batch_terms(
    loss_fn: LossFn,
    output: Any,
    target: Any,
    axes: Sequence[Axis],
    reduction: str,
    micro_batches: int = 1,
    failed: list[Exception] | None = None,
    alike: Sequence[Axis] = (),
) -> Tensor:
    """[2, terms]: the sums of these rows' losses and their weights; or the loss, where these are all rows there are.

    axes: along which other ranks have other rows; micro_batches: how many of these rows there are in a step. failed:
    gets what ``loss_fn`` raises, where other ranks do what this one has to do with them, too; sums are zero then, and
    so they are on all ranks along the axes ``alike``, which have the same rows.

    Raises:
        ValueError: as ``batch_loss``.
    """
    if reduction not in {"mean", "sum"}:
        raise ValueError(f"bad-reduction: {reduction!r}. Allowed: 'mean', 'sum'.")
    parts = [f"{axis.name}={axis.size}" for axis in axes]
    parts += [f"{micro_batches} micro-batches"] if micro_batches > 1 else []
    outputs: Sequence[Tensor] = output if isinstance(output, tuple) else (output,)
    ends = [get_gradient_edge(x).node if x.requires_grad else None for x in outputs]  # loss_fn may change outputs
    seen = set[Node]()
    try:
        totals = _own_terms(loss_fn, output, target, reduction, parts)
        totals = _with_gradient(totals, outputs) if totals.dim() != 2 else totals
        seen = _reached(totals, ends) if parts else seen
    except Exception as error:
        if failed is None:
            raise
        failed.append(error)
    learn_of_failures(failed, alike)
    if failed:
        totals, seen = outputs[0].new_zeros(2, 1, dtype=_type_of_sums(outputs)), set()
    elif totals.dim() != 2:
        return totals
    rest = _rest_of_graph(seen, outputs, ends, axes) if parts or failed else 0
    return _with_gradient(totals + rest if isinstance(rest, Tensor) else totals, outputs)


def _own_terms(loss_fn: LossFn, output: Any, target: Any, reduction: str, parts: Sequence[str]) -> Tensor:
    """What ``loss_fn`` returns of these rows, as ``batch_terms``."""
    torch_loss = _torch_loss(loss_fn) if parts else None
    if torch_loss and reduction == reduction_of(loss_fn, "mean"):
        result: Any = _torch_term(*torch_loss, output, target)
    else:
        result = loss_fn(output, target)
    if isinstance(result, Tensor):
        if result.numel() != 1:
            raise bad_loss(f"It returned {text(result)}, as of reduction='none'; take its sum, and how many count")
        if not parts:
            return result
        if torch_loss or reduction == "mean":
            raise unknown_weights(parts)
        result = result, 1
    return _sums_and_weights(result, output if isinstance(output, tuple) else (output,))


def _with_gradient(loss: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    if torch.is_grad_enabled() and not loss.requires_grad:
        if not any(x.requires_grad for x in outputs):
            raise nothing_trained("no output of the model has a gradient: all its parameters are frozen")
        raise bad_loss("It returned a sum that has no gradient")
    return loss


# ---- What loss_fn returned ----


def _sums_and_weights(result: Any, outputs: Sequence[Tensor]) -> Tensor:
    """[2, terms] of what ``loss_fn`` returned, in float32 or finer: bfloat16 cannot count tokens."""
    terms = result if isinstance(result, list) and result else [result]
    for term in terms:
        if not isinstance(term, tuple) or len(term) != 2 or not all(map(_is_scalar, term)):
            raise bad_loss(f"It returned {text(term)}")
        if isinstance(term[1], Tensor) and term[1].requires_grad:
            raise bad_loss("It returned a weight that has a gradient, as a second loss would")
    dtype, device = _type_of_sums(outputs), outputs[0].device
    return torch.stack([_scalar(x, dtype, device) for row in zip(*terms, strict=True) for x in row]).view(2, -1)


def _type_of_sums(outputs: Sequence[Tensor]) -> torch.dtype:
    return reduce_over(torch.promote_types, (x.dtype for x in outputs), torch.float32)


def _is_scalar(x: object) -> bool:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and x.numel() == 1)


def _scalar(x: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(x, dtype=dtype, device=device).reshape(())


def _reached(loss: Tensor, ends: Sequence[Node | None]) -> set[Node]:
    """What of autograd's graph is between ``loss`` and the model's outputs, with the ends that it reaches.

    Raises:
        ValueError: if ``loss`` trains anything else, whose gradient would be another on each rank, or nothing.
    """
    seen: set[Node] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node not in ends:
            if hasattr(node, "variable"):
                shape = list(node.variable.shape)
                raise bad_loss(f"It trains a tensor of shape {shape} that is not the model's output")
            todo += [before for before, _ in node.next_functions]
    if not loss.requires_grad and loss[0].count_nonzero() and any(end is not None for end in ends):
        raise bad_loss("It returned a sum that has no gradient")
    return seen


def _rest_of_graph(
    seen: set[Node], outputs: Sequence[Tensor], ends: Sequence[Node | None], axes: Sequence[Axis]
) -> Tensor | float:
    """A zero that depends on the outputs that the loss left out, so that every rank runs the same backward.

    Of several outputs not on those that it leaves out on all ranks: what makes them alone has no gradient, as on one.
    """
    left = [end is not None and end not in seen for end in ends]
    if sum(end is not None for end in ends) > 1:
        read = torch.tensor([end in seen for end in ends], device=outputs[0].device, dtype=torch.float32)
        for axis in axes:
            dist.all_reduce(read, dist.ReduceOp.MAX, group=axis.group)
        if any(by_any := read.tolist()):
            left = [own and bool(other) for own, other in zip(left, by_any, strict=True)]
    return sum(x[:0].sum() for x, is_left in zip(outputs, left, strict=True) if is_left)


# ---- The means and sums that torch takes ----


def reduction_of(loss_fn: LossFn, reduction: str) -> str:
    """The reduction, but for a loss of torch that is a sum by its own option: that adds up."""
    is_sum = (_torch_loss(loss_fn) or (None, {}))[1].get("reduction") == "sum"
    return "sum" if is_sum else reduction


def _torch_loss(loss_fn: Any) -> tuple[Callable[..., Tensor], dict[str, Any]] | None:
    """The function and its options, if ``loss_fn`` is one of ``_TORCH_LOSSES`` that takes a mean or a sum."""
    options: dict[str, Any] = {}
    if isinstance(loss_fn, partial) and not loss_fn.args:
        loss_fn, options = loss_fn.func, dict(loss_fn.keywords)
    for function, module, names in _TORCH_LOSSES:
        if type(loss_fn) is module and not options:
            if "forward" in vars(loss_fn) or any(x for name, x in vars(loss_fn).items() if name.endswith("_hooks")):
                return None  # changed by hand
            options = {name: getattr(loss_fn, name) for name in (*names, "reduction")}
        elif loss_fn is not function:
            continue
        known = {"mean", "sum", "batchmean"} if function is F.kl_div else {"mean", "sum"}
        if options.get("reduction", "mean") in known and options.keys() <= {*names, "reduction"}:
            return function, options
    return None


def _torch_term(function: Callable[..., Tensor], options: dict[str, Any], output: Any, target: Any) -> Term:
    """Sum and weight of the rows given, of the mean (or sum) that torch would take of them."""
    losses = function(output, target, **{**options, "reduction": "none"})
    labels = _is_of_labels(function, target)
    of_rows = losses.shape == (output.shape[:-1] if function in _OF_ROWS else output.shape)
    wanted = output.shape[:1] if function is F.multi_margin_loss else output.shape
    aligned = (labels or target.shape == wanted) and (function in _OF_CLASSES or of_rows)
    if not aligned or losses.dim() == 0:  # broadcast, or one row that torch takes for all classes
        shapes = f"{list(output.shape)} and {list(target.shape)}"
        raise bad_loss(f"Rows of output and target, {shapes}, do not go together one by one")
    weight: Tensor | int = losses.numel()
    if labels:
        weight = _weight_of_labels(target, options)
    elif options.get("reduction") == "batchmean":
        weight = output.size(0)
    return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)), weight


def _is_of_labels(function: Callable[..., Tensor], target: Any) -> bool:
    return function in _OF_CLASSES and isinstance(target, Tensor) and not target.is_floating_point()


def _weight_of_labels(target: Tensor, options: Mapping[str, Any]) -> Tensor:
    labels = target.long()  # of bytes, -100 would be 156
    counted: Tensor = labels != options.get("ignore_index", -100)
    class_weights: Tensor | None = options.get("weight")
    if class_weights is None:
        return counted.sum()
    weights = class_weights[labels.where(counted, 0)].where(counted, 0)
    return weights.sum(dtype=torch.promote_types(weights.dtype, torch.float32))
