"""What torch's modules draw at random: numbers of a distribution, and whole rows that layers drop (stochastic depth).

Rows are dropped by torch's dropout, whose masks are planned and proved; other numbers are made of noise between 0 and
1, or of mean 0 and deviation 1. Entry points: ``say_drop_paths``, ``READERS``, ``draws_of``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from ir.graph import Node
from ir.types import DType
from pdv.frontend import masks
from pdv.frontend.lowering import Lowering, Number, Unsupported
from pdv.frontend.torch.scalars import Handler, dtype_of

DRAWN_IN_TRAINING = "drawn_in_training"
"""Where the graph module of an exported program says that its module draws other numbers in evaluation, or none."""
_ROWS = 64  # on which a layer is tried


def say_drop_paths(module: nn.Module) -> None:
    """Dropout that works in place, and layers that keep or drop rows, in a module of one's own, made plain dropout.

    A layer is known by its name and by what it does to ones: rows are zero, or 1 / (1 - drop_prob) throughout.
    """
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):  # noqa: SLF001  # whose forward may write over its operand
            part.inplace = False
        elif _drops_rows(part):
            part.forward = partial(_drop_rows, part)


def _drops_rows(part: nn.Module) -> bool:
    probability = getattr(part, "drop_prob", None)
    if not type(part).__name__.endswith("DropPath") or not isinstance(probability, float) or not 0 < probability < 1:
        return False
    if next(part.parameters(), None) is not None:
        return False
    was_training = part.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = part.train()(torch.ones(_ROWS, 2, 3))
        part.train(was_training)
    kept = torch.full_like(found, 1 / (1 - probability))
    return bool((torch.isclose(found, kept) | (found == 0)).all() and (found == found[:, :1, :1]).all())


def _drop_rows(part: nn.Module, x: Tensor) -> Tensor:
    """x: [rows, ...] with rows kept and scaled, or zero."""
    ones = x.new_ones((x.shape[0], *(1,) * (x.dim() - 1)))
    return x * F.dropout(ones, float(part.drop_prob), part.training)  # type: ignore[arg-type]


def _of_size(kind: str) -> Handler:
    def read(k: Lowering, size: Sequence[int], **options: Any) -> Node:  # Any: types, devices
        return masks.noise(k, kind, size, _type(options))

    return read


def _of_like(kind: str) -> Handler:
    def read(k: Lowering, x: Node, **options: Any) -> Node:  # Any: types, devices
        return masks.noise(k, kind, x.type.shape, _type(options, x.type.dtype))

    return read


def _type(options: Mapping[str, Any], default: DType = DType.F32) -> DType:
    return default if options.get("dtype") is None else dtype_of(options["dtype"])


def _between(k: Lowering, x: Node, low: Number = 0.0, high: Number = 1.0, **_: Any) -> Node:
    drawn = masks.noise(k, "uniform", x.type.shape, x.type.dtype)
    return k.shift(k.scale(drawn, high - low), low)


def _normal(k: Lowering, mean: Node | Number, deviation: Node | Number = 1.0, size: Any = None, **options: Any) -> Node:
    """Of numbers or tensors; the shape is ``size``, or that of both tensors together."""
    tensors = [x for x in (mean, deviation) if isinstance(x, Node)]
    if size is None and len(tensors) == 2:
        tensors = [k.add(*tensors)]
    shape, dtype = (tensors[0].type.shape, tensors[0].type.dtype) if size is None else (size, _type(options))
    drawn = masks.noise(k, "normal", shape, dtype)
    drawn = k.mul(drawn, deviation) if isinstance(deviation, Node) else k.scale(drawn, deviation)
    return k.add(drawn, mean) if isinstance(mean, Node) else k.shift(drawn, mean)


def _normal_over(k: Lowering, x: Node, mean: Number = 0.0, deviation: Number = 1.0, **_: Any) -> Node:
    drawn = masks.noise(k, "normal", x.type.shape, x.type.dtype)
    return k.shift(k.scale(drawn, deviation), mean)


def _integers(k: Lowering, *given: Any, **options: Any) -> Node:  # Any: the low end, the high one, the size
    *ends, size = given
    return _whole(k, size, ends, _type(options, DType.I64))


def _integers_like(k: Lowering, x: Node, *ends: Number, **options: Any) -> Node:
    return _whole(k, x.type.shape, ends, _type(options, x.type.dtype))


def _whole(k: Lowering, shape: Sequence[int], ends: Sequence[Number], dtype: DType) -> Node:
    low, high = (0, *ends)[-2:]
    if not isinstance(low, int) or not isinstance(high, int) or low >= high:
        raise Unsupported(f"integers from {low} to {high}")
    return k.cast(masks.noise(k, "integers", shape, DType.I64, low=low, high=high), dtype)


def _bernoulli(k: Lowering, x: Node, p: Number | Node | None = None, **_: Any) -> Node:
    """One by the chance ``p``, or by that of each element of x."""
    shape = x.type.shape
    drawn = masks.noise(k, "uniform", shape, x.type.dtype if x.type.dtype.is_floating else DType.F32)
    chance = x if p is None else p
    if isinstance(chance, Node):
        return k.cast(masks.compare(k, "<", drawn, k.expand(k.cast(chance, drawn.type.dtype), shape)), x.type.dtype)
    return k.cast(masks.compare_number(k, "<", drawn, chance), x.type.dtype)


def _exponential(k: Lowering, x: Node, rate: Number = 1.0, **_: Any) -> Node:
    drawn = masks.noise(k, "uniform", x.type.shape, x.type.dtype)
    return k.scale(k.apply("log1p", k.scale(drawn, -1.0)), -1.0 / rate)


def _empty(k: Lowering, size: Sequence[int], **options: Any) -> Node:
    """Memory that something else is written to."""
    return masks.fill(k, 0, size, _type(options))


def _empty_like(k: Lowering, x: Node, *size: Any, **options: Any) -> Node:
    return masks.fill(k, 0, size[0] if size else x.type.shape, _type(options, x.type.dtype))


READERS: Mapping[str, Handler] = {
    "aten.rand.default": _of_size("uniform"),
    "aten.randn.default": _of_size("normal"),
    "aten.rand_like.default": _of_like("uniform"),
    "aten.randn_like.default": _of_like("normal"),
    "aten.randint.default": _integers,
    "aten.randint.low": _integers,
    "aten.randint_like.default": _integers_like,
    "aten.randint_like.low_dtype": _integers_like,
    "aten.uniform.default": _between,
    "aten.normal_functional.default": _normal_over,
    "aten.normal.float_float": _normal,
    "aten.normal.Tensor_float": _normal,
    "aten.normal.float_Tensor": _normal,
    "aten.normal.Tensor_Tensor": _normal,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.Tensor": _bernoulli,
    "aten.exponential.default": _exponential,
    "aten.empty.memory_format": _empty,
    "aten.empty_like.default": _empty_like,
    "aten.new_empty.default": _empty_like,
}

DRAWS = frozenset(name.split(".")[1] for name in READERS if "empty" not in name)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While this lasts, draws are counted by their operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := drawn_by(func)) in DRAWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def draws_of(program: ExportedProgram) -> Counter[str]:
    """How often a program draws by which operators, dropout apart."""
    targets = [node.target for node in program.graph.nodes]
    names = [drawn_by(target) for target in targets if isinstance(target, OpOverload)]
    return Counter(name for name in names if name in DRAWS)


def draws_in_evaluation(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Counter[str]:
    """The same of a module of one's own where it does not train, as far as it can be called there."""
    draws = _Draws()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), draws, suppress(Exception):
        module.eval()(*args, **kwargs)
    return draws.counts


def drawn_by(func: Any) -> str:  # Any: an operator of torch
    """The name of an operator without what it writes to; among ``DRAWS`` if it draws."""
    name = func._schema.name.partition("::")[2]  # noqa: SLF001
    return str(name.removesuffix("_").removesuffix("_functional"))
