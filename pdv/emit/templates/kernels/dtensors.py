"""What torch does with DTensors, mended where it is of one rank alone. Entry point: ``mend_distributed_tensors``.

``item`` of a sum, random numbers on CPUs, ``x.data = y``; and collectives that are called on parameters, which torch
refuses in words that say nothing of what to do.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate

from pdv.emit.templates.gradients import Leaves
from pdv.emit.templates.rounding import lend_data
from pdv.emit.templates.stored import counted_lists


@cache
def mend_distributed_tensors(device: str) -> None:
    """From now on, numbers and random numbers of DTensors, and their ``data`` that is set, are those of the whole."""
    if (dispatcher := getattr(DTensor, "_op_dispatcher", None)) is None:
        return  # of simulated ranks
    # torch has no other place to say it; Any: it names the type of one handler as that of all
    handlers: Any = getattr(dispatcher, "_custom_op_handlers", None)
    drawn = getattr(dispatcher, "_random_ops", None) if device == "cpu" else ()  # elsewhere torch draws parts apart
    if handlers is None or drawn is None:
        of = "unmended-torch: item() of cut parameters, and random numbers for them on CPUs, are of one rank"
        warn(f"{of} with torch {torch.__version__}. Take full_tensor() before, or torch 2.13.", stacklevel=2)
    else:
        handlers |= {torch.ops.aten._local_scalar_dense.default: _take_number, **dict.fromkeys(drawn, _draw)}  # noqa: SLF001
        handlers |= dict.fromkeys(_collectives(), _refuse)
        handlers |= counted_lists(handlers)
    DTensor.data = property(lend_data, _set_data)  # type: ignore[assignment]


def _take_number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``item`` gives of one element: of its sum over ranks, if they have parts of it. All ranks must call it."""
    whole = args[0].full_tensor() if any(not one.is_replicate() for one in args[0].placements) else args[0].to_local()
    return op(whole, *args[1:], **kwargs)


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers as on one process, of which each rank takes its own; all must have drawn as many before.

    Raises:
        RuntimeError: if they have not.
    """
    x: DTensor = args[0]
    generator = kwargs.get("generator")
    state = torch.get_rng_state() if generator is None else generator.get_state()
    number = int(state.view(torch.int64).sum())  # 5,056 bytes of a CPU's
    for dim in range(x.device_mesh.ndim):
        ends = torch.tensor([number, -number])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=x.device_mesh.get_group(dim))
        if ends[0] != -ends[1]:
            raise RuntimeError(
                "other-random-numbers: random numbers for a tensor that ranks share, and their generators differ. Call "
                "torch.manual_seed with the same number on all ranks before; draw what is to differ from a generator "
                "of its own (torch.Generator)."
            )
    whole = x.full_tensor().detach()
    in_place = op._schema.name.endswith("_")  # noqa: SLF001
    drawn = op(whole.clone() if in_place else whole, *args[1:], **kwargs)
    parts = [own_part(part, x) for part in (drawn if isinstance(drawn, tuple) else (drawn,))]
    if in_place:
        x.to_local().copy_(parts[0].to_local())
        return x
    return tuple(parts) if isinstance(drawn, tuple) else parts[0]


@torch.no_grad()
def _set_data(x: DTensor, value: Tensor) -> None:
    """``x.data = value``: ``x`` is in its memory from now on, as torch has it; of a plain tensor, in that of its part.

    What was in the memory of ``x``, such as ``x.data`` that was taken before, keeps its values.

    Raises:
        RuntimeError: of another shape or type.
    """
    if value.shape != x.shape or value.dtype != x.dtype:
        raise RuntimeError(
            f"other-data: .data of a parameter of {x.dtype} {list(x.shape)} was set to {value.dtype} "
            f"{list(value.shape)}. Allowed: the same type and shape. Give build the dtype, or call model.to()."
        )
    placed = value.redistribute(x.device_mesh, x.placements) if isinstance(value, DTensor) else own_part(value, x)
    with torch.inference_mode(mode=False):
        piece = placed.to_local().detach().to(x.to_local().device).contiguous()
        _go_on_in(x, piece.clone() if piece.is_inference() else piece)


def _go_on_in(x: DTensor, piece: Tensor) -> None:
    """Let ``x``, and what is read and stepped in its place, be in the memory of ``piece``."""
    leaves = getattr(x, "leaves", None)
    if isinstance(leaves, Leaves):
        shard, offload = leaves.shard(x), leaves.sums.offload
        piece = piece if offload is None else offload.on_host(piece)
        where = shard.data_ptr()
        versions = leaves.versions(shard).of if leaves.sums.turn is not None else ()
        read = (each for leaf in leaves.by_axes.values() for each in (leaf.rests, leaf.tensor))
        held = [each for each in (shard, *versions, *read) if each.data_ptr() == where]
        for each in held:
            each.data = piece
        increment_version([shard, *(leaf.rests for leaf in leaves.by_axes.values())])
    x._local_tensor = piece.detach()  # noqa: SLF001  # as FSDP2


def _refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a collective of ``torch.distributed`` that is called on DTensors.

    Raises:
        RuntimeError: always.
    """
    del args, kwargs
    raise RuntimeError(
        f"own-collective: {op} was called on a parameter, gradient or other DTensor of the model, by "
        "DistributedDataParallel, ZeroRedundancyOptimizer or the like, or by torch.distributed itself. The model sums "
        "its gradients over ranks, and keeps weights alike, by itself. Leave that out; of a collective of your own "
        "pass x.to_local(), what this rank holds, or x.full_tensor(), the whole."
    )


def _collectives() -> list[Any]:
    names = [name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]  # noqa: SLF001
    return [getattr(torch.ops.c10d, name).default for name in names if "." not in name]


def own_part(whole: Tensor, x: DTensor) -> DTensor:
    """A tensor that every rank has, placed as ``x``; not cut where ``x`` is the term of a sum."""
    from torch.distributed.tensor import distribute_tensor  # simulated ranks have none

    placed = [Replicate() if one.is_partial() else one for one in x.placements]
    return distribute_tensor(whole.detach(), x.device_mesh, placed, src_data_rank=None)
