"""What is said of losses that no step can take, and of a step that one rank could not. Entry points: its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


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


def failed_elsewhere() -> RuntimeError:
    """Of a step whose loss another rank could not take."""
    return RuntimeError(
        "loss-failed: loss_fn ended in an error on another rank, which says which. No rank has gradients of this "
        "step. Let it end the process; or leave the batch out, on all ranks, and go on."
    )
