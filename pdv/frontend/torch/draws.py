"""What torch's modules draw at random: numbers of a distribution, and elements, channels or rows that layers drop.

What is dropped in training alone is so by torch's dropout, whose masks are planned and proved; other numbers are made
of noise between 0 and 1, or of mean 0 and deviation 1. Which is which is found by running the module in evaluation.
Entry points: ``say_drop_paths``, ``READERS``, ``draws_of``, ``drawing_of``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ir.graph import Node
from ir.types import DType
from pdv.frontend import masks
from pdv.frontend.lowering import Lowering, Number, Unsupported
from pdv.frontend.torch.exported_state import unlogged
from pdv.frontend.torch.scalars import Handler, dtype_of
from pdv.frontend.torch.tracing.leftovers import buffers_kept, tracing

DRAWING = "drawing"
"""Where the graph module of an exported program keeps the ``Drawing`` of its module."""
_ROWS = 64  # on which a layer is tried
_ALPHA = 1.7580993408473766  # of torch's alpha dropout: the scale of SELU, times its alpha
DROPPING: Mapping[Callable[..., Any], int] = {
    F.dropout: 1, torch.dropout: 1, F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10,
    F.dropout1d: 1, F.dropout2d: 1, F.dropout3d: 1, torch.feature_dropout: 1, F.alpha_dropout: 1,
    torch.alpha_dropout: 1, F.feature_alpha_dropout: 1, torch.feature_alpha_dropout: 1,
    torch.lstm: 5, torch.gru: 5, torch.rnn_tanh: 5, torch.rnn_relu: 5,
}  # fmt: skip
"""Functions that drop out -> the place of the probability among their arguments."""


Place = tuple[str, str]
"""Where a program calls an operator: in which module of its source, and at which lines."""


@dataclass(frozen=True)
class Drawing:
    """When a module draws.

    Attributes:
        trains: whether its noise is of training alone, or might be.
        always: where its dropout is not of training alone, and noise as any other.
    """

    trains: bool = False
    always: frozenset[Place] = frozenset()


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


def _dropout(k: Lowering, x: Node, p: float, train: bool) -> Node:
    return masks.dropout(k, x, p) if train else x


DROPOUT: Mapping[str, Handler] = {
    "aten.dropout.default": _dropout,
    "aten.native_dropout.default": lambda k, x, p, train: (_dropout(k, x, p, train), None),
}
"""Of training alone, unless the module drops out in evaluation, too."""


def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Whole channels kept and scaled, or zero."""
    return x * F.dropout(_ones_of_channels(x), p) if train and p else x


def _alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _at_least(x, F.dropout(torch.ones_like(x), p), p) if train and p else x


def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _at_least(x, F.dropout(_ones_of_channels(x), p), p) if train and p else x


def _ones_of_channels(x: Tensor) -> Tensor:
    return x.new_ones((*x.shape[:2], *[1] * (x.dim() - 2)))


def _at_least(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Of mean and deviation as before, with least values where ``kept`` is 0; as it is where ``kept`` is 1.

    kept: 0 or 1 / (1 - p) in training, 1 in evaluation.
    """
    scale = (1 - p) / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    return torch.where(kept == 1, x, ((x + _ALPHA) * kept - _ALPHA) * scale)


AS_DROPOUT: Mapping[OpOverload, Callable[[Tensor, float, bool], Tensor]] = {
    torch.ops.aten.feature_dropout.default: _feature_dropout,
    torch.ops.aten.alpha_dropout.default: _alpha_dropout,
    torch.ops.aten.feature_alpha_dropout.default: _feature_alpha_dropout,
}
"""Operators that torch makes of noise, by plain dropout, which is of training alone."""

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


@dataclass
class _Drawn:
    """What a run of a module drew, by operators: dropout, and the rest."""

    noise: list[str] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While this lasts, draws are noted by their operators."""

    def __init__(self, drawn: _Drawn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if (name := drawn_by(func)) in DRAWS:
            self._drawn.noise.append(name)
        elif _share_of(func, args, options):
            self._drawn.drops.append(name)
        return func(*args, **options)


class _Drops(TorchFunctionMode):
    """While this lasts, what functions that drop out draw is noted as dropout."""

    _NAMES = frozenset(function.__name__ for function in DROPPING)

    def __init__(self, drawn: _Drawn) -> None:
        super().__init__()
        self._drawn = drawn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self._drawn.noise)
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if "dropout" in name or name in self._NAMES:
            self._drawn.drops += self._drawn.noise[before:]
            del self._drawn.noise[before:]
        return found


def draws_of(program: ExportedProgram) -> Counter[str]:
    """How often a program draws by which operators, dropout apart."""
    targets = [node.target for node in program.graph.nodes]
    names = [drawn_by(target) for target in targets if isinstance(target, OpOverload)]
    return Counter(name for name in names if name in DRAWS)


def drawing_of(
    program: ExportedProgram,
    own: Callable[[], nn.Module],
    export: Callable[[nn.Module], ExportedProgram],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Drawing:
    """When the module draws of which a program was exported, by what it draws in evaluation.

    own: makes a copy of the module as it was exported, of the same tensors; export: what exported it.
    """
    noise, drops = draws_of(program), _drops_of(program)
    if not noise and not drops:
        return Drawing()
    module = own()
    if not module.training:
        return Drawing(always=frozenset(place for place, _ in drops))
    try:
        found = _drawn_in(module.eval(), args, kwargs)
    except Exception:  # noqa: BLE001  # of exported programs, which have no other mode
        found = _Drawn()
    trains = bool(noise) and noise != Counter(found.noise)
    if not found.drops:
        return Drawing(trains)
    try:
        again = _drops_of(export(own().eval()))
    except Exception:  # noqa: BLE001  # whatever the module's own code raises: then nobody knows which it draws
        return Drawing(trains=True, always=frozenset(place for place, _ in drops))
    other = {place for place, _ in (drops - again) | (again - drops)}
    always = {place for place, _ in again}
    return Drawing(trains or not always or bool(always & other), frozenset(always))


def _drops_of(program: ExportedProgram) -> Counter[tuple[Place, float]]:
    """Where a program drops out which share, and how often."""
    nodes = [node for node in program.graph.nodes if isinstance(node.target, OpOverload)]
    shares = [(node, _share_of(node.target, node.args, node.kwargs)) for node in nodes]
    return Counter((place_of(node), share) for node, share in shares if share)


def place_of(node: torch.fx.Node) -> Place:
    """The same of all operators that one of torch's is taken apart to."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    return str(modules[-1][0]) if modules else "", str(node.meta.get("stack_trace", ""))


def _drawn_in(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Drawn:
    """What a module of one's own draws, as far as it can be called: without values, else with them."""
    drawn = _Drawn()
    for run in (_without_values, _with_values):
        drawn = _Drawn()
        try:
            with buffers_kept(module):
                run(module, args, kwargs, drawn)
        except Exception:  # noqa: BLE001, S112  # whatever the module's own code raises
            continue
        break
    return drawn


def _without_values(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], drawn: _Drawn) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (tuple(args), dict(kwargs)))
    with tracing(module), unlogged(), mode, _Draws(drawn), _Drops(drawn):
        module(*given[0], **given[1])


def _with_values(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], drawn: _Drawn) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _Draws(drawn), _Drops(drawn):
        module(*args, **kwargs)


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of one of torch's operators, by name."""
    arguments = func._schema.arguments  # noqa: SLF001
    named = {argument.name: argument.default_value for argument in arguments}
    return named | dict(zip(named, args, strict=False)) | dict(kwargs)


def _share_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:  # Any: an operator of torch
    """What share a call of one of torch's operators drops out."""
    named = named_arguments(func, args, kwargs)
    if named.get("train") is False:
        return 0.0
    share = named.get("p" if "dropout" in func._schema.name else "dropout", named.get("dropout_p"))  # noqa: SLF001
    return float(share) if isinstance(share, int | float) else 0.0


def drawn_by(func: Any) -> str:  # Any: an operator of torch
    """The name of an operator without what it writes to; among ``DRAWS`` if it draws."""
    name = func._schema.name.partition("::")[2]  # noqa: SLF001
    return str(name.removesuffix("_").removesuffix("_functional"))
