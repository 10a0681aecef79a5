"""An exported program in operators that have a reader, with the gradients that torch itself gives.

What torch says of an operator by others may have another gradient at zero or at a bound: such operators stay whole.
`run_decompositions` also inlines regions without gradient and forgets that they were: a detach is left behind each of
their results. Entry points: ``decompose``, ``decompositions``.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch._decomp.decompositions as decompositions_of_torch
import torch._export.utils as torch_of_export
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch.export import ExportedProgram, exported_program
from torch.utils._pytree import tree_leaves

from ir.errors import ModelError, first_line
from pdv.frontend.torch.aten import HANDLERS
from pdv.frontend.torch.draws import AS_DROPOUT
from pdv.frontend.torch.exported_state import check_constants, check_words, shared_names, without_spare_names
from pdv.frontend.torch.opaque import OF_SAMPLES

DETACHES = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
_ATEN = torch.ops.aten
_MADE_OF_OTHERS = [  # beside those that torch takes apart for core ATen
    _ATEN.leaky_relu, _ATEN.hardshrink, _ATEN.softshrink,
    _ATEN.mish, _ATEN.glu, _ATEN.log_sigmoid_forward,
    _ATEN.binary_cross_entropy, _ATEN.binary_cross_entropy_with_logits, _ATEN.soft_margin_loss,
    _ATEN.upsample_nearest2d, _ATEN.addcmul, _ATEN.addcdiv, _ATEN.lerp, _ATEN.addmv,
    _ATEN.baddbmm, _ATEN.threshold, _ATEN.std, _ATEN.var, _ATEN.var_mean, _ATEN.tril, _ATEN.triu,
]  # fmt: skip
_OF_THEIR_OWN = (  # as torch takes them apart, they have other values or gradients at zero, or at margins
    _ATEN.sinc, _ATEN.special_sinc, _ATEN.logit, _ATEN.special_logit, _ATEN.xlogy, _ATEN.special_xlogy,
    _ATEN.special_xlog1py, _ATEN.special_entr, _ATEN.special_log_ndtr, _ATEN.multi_margin_loss,
    _ATEN.multilabel_margin_loss, _ATEN.multilabel_margin_loss_forward,
)  # fmt: skip
_KEYS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")  # torch's, by kind of device
_ALWAYS = (_ATEN.multi_margin_loss.default, _ATEN.multilabel_margin_loss_forward.default)  # without being asked


def decompositions() -> dict[Any, Callable[..., Any]]:  # Any: operators of torch
    """What torch says of operators by others: of those that have no reader, and that it says rightly.

    Not of those that are cut as they are: ``col2im`` is taken apart into a sum by ids, which nobody cuts.
    """
    table = {**get_decompositions(_MADE_OF_OTHERS), **torch.export.default_decompositions()}
    own = {getattr(packet, name) for packet in (*_OF_THEIR_OWN, *OF_SAMPLES) for name in packet.overloads()}  # type: ignore[no-untyped-call]
    found = {target: made for target, made in table.items() if str(target) not in HANDLERS and target not in own}
    return {**found, _ATEN.as_strided.default: _as_strided, _ATEN.as_strided_copy.default: _as_strided}


def decompose(program: ExportedProgram) -> ExportedProgram:
    """In operators that have a reader, as far as torch can say the others by such.

    Raises:
        ModelError: if torch cannot.
    """
    check_constants(program)
    with (
        stopped_gradients(program),
        without_spare_names(program),
        _kept_whole(),
        _dropped_between(),
        _listed_once(program),
    ):
        return _run(program)


@contextmanager
def _kept_whole() -> Iterator[None]:
    """While this lasts, torch takes none of ``_ALWAYS`` apart when it is traced, and some as is said here."""
    others: dict[OpOverload, Callable[..., torch.Tensor]] = {
        **AS_DROPOUT,
        _ATEN.rrelu.default: _rrelu,
        _ATEN.instance_norm.default: _instance_norm,
        _ATEN.fill_diagonal_.default: _fill_diagonal,
    }
    before = {function: dict(function.py_kernels) for function in (*_ALWAYS, *others)}
    for function in _ALWAYS:
        del function.py_kernels[DispatchKey.Autograd]
    for function, made in others.items():
        function.py_kernels.update({DispatchKey.Autograd: made, DispatchKey.CompositeImplicitAutograd: made})
    for function in before:
        function._dispatch_cache.clear()  # noqa: SLF001  # has no public name
    try:
        yield
    finally:
        for function, kernels in before.items():
            function.py_kernels.clear()
            function.py_kernels.update(kernels)
            function._dispatch_cache.clear()  # noqa: SLF001


def _fill_diagonal(x: torch.Tensor, value: float, wrap: bool = False) -> torch.Tensor:
    """Elements by their indices, where torch takes them by their places in memory (``as_strided``).

    Raises:
        NotImplementedError: if what goes on below the last column is of memory that does not lie in order.
    """
    places = [torch.arange(size, device=x.device) for size in x.shape]
    grid = torch.meshgrid(places, indexing="ij")
    if not wrap or x.dim() > 2 or x.size(0) <= x.size(1) + 1:
        chosen = functools.reduce(torch.logical_and, (grid[0] == other for other in grid[1:]))
    elif x.is_contiguous():
        chosen = (grid[0] - grid[1]).remainder(x.size(1) + 1) == 0
    else:
        raise NotImplementedError("fill_diagonal_(wrap=True) of a tensor that is not contiguous")
    return x.masked_fill_(chosen, value)


def _as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:  # Any: a tensor, or that there is none
    """Elements by their places in memory, which programs lay out otherwise than the module: by the dims that these are.

    Of what fills its memory, in any order. Dims that stay are left alone; of the others elements are chosen.
    """
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    dense = [x.stride(dim) == math.prod(x.size(other) for other in order[at + 1 :]) for at, dim in enumerate(order)]
    last = sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if not all(dense) or storage_offset or x.storage_offset() or last >= x.numel():
        return NotImplemented
    kept = _staying(x, size, stride)
    rest = [dim for dim in range(x.dim()) if dim not in kept.values()]
    now = [*kept, *(at for at in range(len(size)) if at not in kept)]
    ids = torch.zeros((1,), dtype=torch.int64, device=x.device)
    for at in now[len(kept) :]:
        ids = (ids[:, None] + torch.arange(size[at], device=x.device) * stride[at]).flatten()
    coordinates = [ids.div(x.stride(dim), rounding_mode="floor").remainder(x.size(dim)) for dim in rest]
    ids = torch.zeros_like(ids)
    for dim, found_there in zip(rest, coordinates, strict=True):
        ids = ids * x.size(dim) + found_there
    flat = x.permute(*kept.values(), *rest).reshape(*(x.size(dim) for dim in kept.values()), -1)
    taken = flat.index_select(len(kept), ids).reshape([size[at] for at in now])
    return taken.permute([now.index(at) for at in range(len(size))])


def _staying(x: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> dict[int, int]:
    """Dims of the result -> those of ``x`` that they are, along which no other dim of the result goes."""
    dims = list(zip(size, stride, strict=True))
    places = {(x.size(dim), x.stride(dim)): dim for dim in range(x.dim())}
    kept = {at: places[pair] for at, pair in enumerate(dims) if pair in places and dims.count(pair) == 1}
    while True:
        chosen = np.zeros((), np.int64)
        for at in [at for at in range(len(dims)) if at not in kept]:
            chosen = chosen[..., None] + np.arange(size[at]) * stride[at]
        moved = [at for at, dim in kept.items() if (chosen // x.stride(dim) % x.size(dim)).any()]
        if not moved:
            return kept
        kept = {at: dim for at, dim in kept.items() if at not in moved}


def _rrelu(
    x: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: None = None
) -> torch.Tensor:
    """What is negative by a slope of its own; in evaluation by their mean."""
    del generator  # noise is the program's own
    slope = torch.rand_like(x) * (upper - lower) + lower if training else (lower + upper) / 2
    return torch.where(x > 0, x, x * slope)


def _instance_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """A group norm of groups of one channel. Torch makes one batch of samples and channels, which nobody can cut."""
    if not use_input_stats:
        return torch.batch_norm(x, weight, bias, mean, var, False, momentum, eps, cudnn_enabled)
    with torch.no_grad():
        spread, average = torch.var_mean(x.flatten(2), dim=2)
        for kept, each in ((mean, average), (var, spread)):
            if kept is not None:
                kept.copy_((1 - momentum) * kept + momentum * each.mean(0))
    return torch.group_norm(x, x.size(1), weight, bias, eps, cudnn_enabled)


@contextmanager
def _dropped_between() -> Iterator[None]:
    """While this lasts, layers of a recurrent network are taken apart with the dropout between them.

    Torch's own ``_rnn_helper`` leaves it out: it asks for more layers than there are.
    """
    plain: Any = decompositions_of_torch._rnn_helper  # noqa: SLF001  # has no public name

    def helper(*given: Any) -> Any:  # Any: as torch's own takes them
        *others, p, train, bidirectional, batch_first, layer = given
        seen: list[tuple[Any, Any]] = []  # what goes into each layer, in both directions, and the same dropped out

        def dropped(x: Any, *args: Any, **kwargs: Any) -> Any:
            if not seen or seen[-1][0] is not x:
                seen.append((x, torch.dropout(x, p, True) if seen else x))
            return layer(seen[-1][1], *args, **kwargs)

        return plain(*others, p, train, bidirectional, batch_first, dropped if train and p else layer)

    decompositions_of_torch._rnn_helper = helper  # noqa: SLF001
    try:
        yield
    finally:
        decompositions_of_torch._rnn_helper = plain  # noqa: SLF001


class _Kinds(type):
    """Of types that are whatever arguments they have, and whose instances are all that can be called."""

    def __getitem__(cls, _: Any) -> type:  # Any: arguments of a type
        return cls

    def __instancecheck__(cls, instance: Any) -> bool:  # Any: whatever is asked about
        return callable(instance)


class _Callable(metaclass=_Kinds): ...


@contextmanager
def _listed_once(program: ExportedProgram) -> Iterator[None]:
    """While this lasts, torch lists its operators once, and does not work out types that nobody asks for.

    It lists them for every namespace, of which there are fifty, and defines a function with annotated arguments for
    every operator and kind of device, ten thousand of them, where a program has one or two kinds: a third of a
    second, whatever it is.
    """
    kinds = _kinds_of_devices(program)
    changed = (  # none is public, and may go
        (torch_of_export, "_materialize_cpp_cia_ops", lambda: None),
        (torch._ops, "Callable", _Callable),  # noqa: SLF001
        *((exported_program, name, _keys_of(kinds, getattr(exported_program, name, []))) for name in _KEYS),
    )
    before = [getattr(file, name, None) for file, name, _ in changed]
    if before[0] is not None:
        before[0]()
    for file, name, value in changed:
        setattr(file, name, value)
    try:
        yield
    finally:
        for (file, name, _), plain in zip(changed, before, strict=True):
            setattr(file, name, plain)


def _kinds_of_devices(program: ExportedProgram) -> set[str]:
    """Those that the program's tensors are on, and of tensors without values, as dispatch keys have them."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    kinds = {value.device.type.upper() for value in tree_leaves(values) if isinstance(value, torch.Tensor)}
    kinds |= {"PRIVATEUSE1"} if torch._C._get_privateuse1_backend_name().upper() in kinds else set()  # noqa: SLF001  # has no public name
    return {*kinds, "CPU", "META"}


def _keys_of(kinds: set[str], keys: Sequence[DispatchKey]) -> list[DispatchKey]:
    return [key for key in keys if key.name.removeprefix("Autograd").upper() in kinds]


def _run(program: ExportedProgram) -> ExportedProgram:
    try:
        with warnings.catch_warnings():  # torch copies trees of its own that its own newer words replace
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec")
            return cast(ExportedProgram, program.run_decompositions(decompositions()))
    except Exception as error:  # whatever torch asserts about programs
        check_words(program, error)
        shared = "; ".join(", ".join(names) for names in shared_names(program))
        raise ModelError(
            f"torch cannot decompose the exported program: {type(error).__name__}: {first_line(error)}",
            f"Tensors that are overwritten share memory with no others; here these do: {shared}" if shared else "",
            "Give them memory of their own" if shared else _remedy(error),
        ) from error


def _remedy(error: Exception) -> str:
    if "data-dependent" in str(error):
        return "Give losses all rows, with labels that they ignore (-100) in place of rows that a mask chooses"
    return "See that program.run_decompositions({}) works"


@contextmanager
def stopped_gradients(program: ExportedProgram) -> Iterator[None]:
    """While this lasts, results of regions without gradient are detached in the program's own graph."""
    made: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    names: dict[str, str] = {}
    for node in list(program.graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for result in [user for user in node.users if user.target is operator.getitem]:
                with program.graph.inserting_after(result):
                    detached = program.graph.call_function(DETACHES[0], (result,))
                detached.meta = dict(result.meta)
                result.replace_all_uses_with(detached, delete_user_cb=lambda user, new=detached: user is not new)
                made.append((result, detached))
                names[result.name] = detached.name
    _rename_outputs(program, names)
    try:
        yield
    finally:
        for result, detached in made:
            detached.replace_all_uses_with(result)
            program.graph.erase_node(detached)
        _rename_outputs(program, {new: old for old, new in names.items()})


def _rename_outputs(program: ExportedProgram, names: dict[str, str]) -> None:
    for spec in program.graph_signature.output_specs:
        name = getattr(spec.arg, "name", None)
        if name in names:
            spec.arg.name = names[name]
