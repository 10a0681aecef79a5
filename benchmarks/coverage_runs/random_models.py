"""Random ONNX models: several operators each, odd shapes, several opsets, both modes; and what they should give.

A model grows node by node. A node's result is computed by onnx's reference implementation as it is added, and one that
fails, or gives what is not finite or large, is left out again. Entry points: ``models``, ``survey``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from benchmarks.coverage_runs.apart import LATE, each_apart
from benchmarks.coverage_runs.running import TIME_OUT_S, Case, run_case

OPSETS = (11, 13, 15, 17, 18, 20, 22, 23)
SIZES = (1, 2, 2, 3, 4, 5, 6, 7, 8)
MOST_ELEMENTS, LARGEST = 4096, 1e3
RTOL, ATOL = 1e-3, 1e-4

Array = np.ndarray[Any, Any]  # Any: floats, integers and booleans


class Growing:
    """A model so far: its values by name, as they are on the inputs that it is compared on."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.opset = int(self.random.choice(OPSETS))
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, Array] = {}
        self.stored: dict[str, Array] = {}
        self.values: dict[str, Array] = {}
        self.read: set[str] = set()

    def input(self, shape: Sequence[int]) -> str:
        """A new input of floats."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.values[name] = self.random.normal(size=shape).astype(np.float32)
        return name

    def weight(self, shape: Sequence[int]) -> str:
        """A new stored tensor of floats."""
        return self.store(self.random.normal(size=shape).astype(np.float32) / math.sqrt(max(shape[-1:], default=1)))

    def store(self, array: Any) -> str:  # Any: whatever NumPy makes an array of
        """A stored tensor, or an operand that is known."""
        name = f"w{len(self.stored)}"
        self.stored[name] = np.asarray(array)
        return name

    def pick(self, accept: Callable[[Array], bool] = lambda x: x.dtype == np.float32 and x.ndim > 0) -> str | None:
        """The name of a value, late ones more often."""
        names = [name for name, x in self.values.items() if accept(x)]
        return names[-1 - int(min(self.random.geometric(0.5) - 1, len(names) - 1))] if names else None

    def int(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return int(self.random.integers(low, high + 1))

    def axis(self, x: Array) -> int:
        """A dim, sometimes counted from the end."""
        return self.int(-x.ndim, x.ndim - 1)

    def axes_of(self, x: Array, least: int = 1) -> list[int]:
        """Some dims."""
        count = self.int(least, max(x.ndim, least))
        return sorted(int(dim) for dim in self.random.choice(x.ndim, size=min(count, x.ndim), replace=False))

    def add(self, op: str, operands: Sequence[str], results: int = 1, **attrs: Any) -> bool:  # Any: of an ONNX node
        """A node, if it can be computed and what it gives is of some use."""
        names = [f"v{len(self.values) + i}" for i in range(results)]
        node = helper.make_node(op, list(operands), names, **attrs)
        feeds = {name: (self.values | self.stored)[name] for name in operands if name}
        inputs = [helper.make_empty_tensor_value_info(name) for name in feeds]
        graph = helper.make_graph([node], "one", inputs, [helper.make_empty_tensor_value_info(name) for name in names])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        try:
            with np.errstate(all="ignore"):
                found = [np.asarray(x) for x in ReferenceEvaluator(model).run(None, feeds)]
        except Exception:  # noqa: BLE001  # whatever it raises on operands that do not fit
            return False
        if not all(0 < x.size <= MOST_ELEMENTS and x.dtype.kind in "fib" for x in found):
            return False
        if not all(np.isfinite(x).all() and np.abs(x.astype(np.float64)).max() < LARGEST for x in found):
            return False
        self.nodes.append(node)
        self.values |= dict(zip(names, found, strict=True))
        self.read |= {*operands}
        return True


def _unary(g: Growing) -> bool:
    plain = ["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Erf", "Softplus", "Softsign", "Sin", "Cos", "Atan", "Exp", "Elu"]
    plain += ["LeakyRelu", "Selu", "HardSigmoid", "Sign", "Floor", "Identity", "Celu", "ThresholdedRelu", "Sqrt", "Log"]
    plain += ["HardSwish"] * (g.opset >= 14) + ["Mish"] * (g.opset >= 18) + ["Gelu"] * (g.opset >= 20)
    x = g.pick()
    return x is not None and g.add(str(g.random.choice(plain)), [x])


def _other(g: Growing, x: str) -> str:
    """An operand that is broadcast with x: a value that there is, or weights."""
    shape = g.values[x].shape

    def fits(y: Array) -> bool:
        try:
            return y.dtype == np.float32 and np.broadcast_shapes(y.shape, shape) is not None
        except ValueError:
            return False

    if g.random.random() < 0.5 and (found := g.pick(fits)):
        return found
    start = g.int(0, len(shape))
    return g.weight([1 if g.random.random() < 0.3 else n for n in shape[start:]])


def _binary(g: Growing) -> bool:
    x = g.pick()
    if x is None:
        return False
    op = str(g.random.choice(["Add", "Sub", "Mul", "Max", "Min", "Div", "PRelu", "Sum", "Mean", "Pow"]))
    y = g.store(np.float32(g.random.choice([2.0, 3.0]))) if op == "Pow" else _other(g, x)
    operands = [x, y] if op in ("PRelu", "Pow") or g.random.random() < 0.7 else [y, x]
    return g.add(op, operands)


def _choice(g: Growing) -> bool:
    x = g.pick()
    if x is None:
        return False
    if not g.add(str(g.random.choice(["Greater", "Less"])), [x, _other(g, x)]):
        return False
    mask = [*g.values][-1]
    return g.add("Where", [mask, x, _other(g, x)])


def _matmul(g: Growing) -> bool:
    x = g.pick()
    if x is None:
        return False
    width = g.values[x].shape[-1]
    if g.values[x].ndim == 2 and g.random.random() < 0.5:
        flip = bool(g.int(0, 1))
        out = g.int(1, 8)
        w, bias = g.weight((out, width) if flip else (width, out)), g.weight((out,))
        return g.add("Gemm", [x, w, bias], transB=int(flip), alpha=float(g.random.choice([1.0, 0.5])))
    return g.add("MatMul", [x, g.weight((width, g.int(1, 8)))])


def _shape(g: Growing) -> bool:
    x = g.pick(lambda x: x.ndim > 0)
    if x is None:
        return False
    value, kind = g.values[x], g.int(0, 5)
    if kind == 0:
        return g.add("Transpose", [x], perm=[int(d) for d in g.random.permutation(value.ndim)])
    if kind == 1:
        dims = list(value.shape)
        at = g.int(0, len(dims) - 1)
        factors = [f for f in range(1, dims[at] + 1) if dims[at] % f == 0]
        part = int(g.random.choice(factors))
        split = [*dims[:at], part, dims[at] // part, *dims[at + 1 :]]
        shape = split if g.random.random() < 0.5 else [*dims[:at], -1]
        return g.add("Reshape", [x, g.store(np.array(shape, np.int64))])
    if kind == 2:
        return g.add("Flatten", [x], axis=g.int(-value.ndim, value.ndim))
    if kind == 3 and g.opset >= 13:
        return g.add("Unsqueeze", [x, g.store(np.array([g.int(0, value.ndim)], np.int64))])
    if kind == 4 and g.opset >= 13:
        ones = [i for i, n in enumerate(value.shape) if n == 1]
        return g.add("Squeeze", [x, g.store(np.array(ones[:1], np.int64))]) if ones else False
    lead = [g.int(1, 3), *[1 if n > 1 else g.int(1, 3) for n in value.shape]]
    return value.ndim < 4 and g.add("Expand", [x, g.store(np.array(lead, np.int64))])


def _parts(g: Growing) -> bool:
    x = g.pick(lambda x: x.ndim > 0)
    if x is None:
        return False
    value, kind = g.values[x], g.int(0, 6)
    axis = g.axis(value)
    size = value.shape[axis]
    if kind == 0:
        step = int(g.random.choice([1, 1, 2, 3, -1, -2]))
        start, stop = (g.int(0, size - 1), g.int(1, size + 2)) if step > 0 else (size, -size - 1)
        operands = [g.store(np.array([n], np.int64)) for n in (start, stop, axis, step)]
        return g.add("Slice", [x, *operands])
    if kind == 1 and size > 1 and g.opset >= 13:
        first = g.int(1, size - 1)
        return g.add("Split", [x, g.store(np.array([first, size - first], np.int64))], 2, axis=axis)
    if kind == 2:
        same = [n for n, y in g.values.items() if y.dtype == value.dtype and y.shape == value.shape]
        return g.add("Concat", [x, str(g.random.choice(same))], axis=axis)
    if kind == 3:
        ids = g.random.integers(-size, size, size=g.random.choice(SIZES, size=g.int(0, 2)))
        return g.add("Gather", [x, g.store(np.asarray(ids, np.int64))], axis=axis)
    if kind == 4:
        return g.add("Tile", [x, g.store(np.array([g.int(1, 2) for _ in value.shape], np.int64))])
    if kind == 5 and value.dtype == np.float32:
        mode = str(g.random.choice(["constant", "edge", "reflect"]))
        most = 0 if mode == "reflect" and min(value.shape) < 3 else 2
        pads = [g.int(-1 if mode == "constant" else 0, most) for _ in range(2 * value.ndim)]
        return g.add("Pad", [x, g.store(np.array(pads, np.int64))], mode=mode)
    return value.ndim >= 2 and g.opset >= 14 and g.add("Trilu", [x], upper=g.int(0, 1))


def _reduction(g: Growing) -> bool:
    x = g.pick()
    if x is None:
        return False
    value, keep = g.values[x], g.int(0, 1)
    if g.random.random() < 0.25:
        return g.add(str(g.random.choice(["ArgMax", "ArgMin"])), [x], axis=g.axis(value), keepdims=keep)
    if g.random.random() < 0.2:
        return g.add("CumSum", [x, g.store(np.array(g.axis(value), np.int64))], reverse=keep, exclusive=g.int(0, 1))
    kinds = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare"]
    op, axes = str(g.random.choice([*kinds, "ReduceLogSumExp", "ReduceProd"])), g.axes_of(value)
    if g.opset >= 18 or (op == "ReduceSum" and g.opset >= 13):
        return g.add(op, [x, g.store(np.array(axes, np.int64))], keepdims=keep)
    return g.add(op, [x], axes=axes, keepdims=keep)


def _norm(g: Growing) -> bool:
    x = g.pick()
    if x is None:
        return False
    value, kind = g.values[x], g.int(0, 4)
    if kind == 0:
        axis = g.axis(value) if g.opset >= 13 else value.ndim - 1
        return g.add(str(g.random.choice(["Softmax", "LogSoftmax"])), [x], axis=axis)
    if kind == 1 and g.opset >= 17:
        axis = g.int(-min(value.ndim, 2), -1)
        shape = value.shape[axis:]
        return g.add("LayerNormalization", [x, g.weight(shape), g.weight(shape)], axis=axis)
    if value.ndim < 3:
        return False
    channels = (value.shape[1],)
    if kind == 2:
        return g.add("InstanceNormalization", [x, g.weight(channels), g.weight(channels)])
    if kind == 3:
        statistics = [g.store(np.abs(g.random.normal(size=channels)).astype(np.float32) + 0.5) for _ in range(2)]
        return g.add("BatchNormalization", [x, g.weight(channels), g.weight(channels), *statistics])
    return g.add("LRN", [x], size=g.int(1, 3)) if value.ndim == 4 else False


def _window(g: Growing) -> bool:
    x = g.pick(lambda x: x.dtype == np.float32 and x.ndim in (3, 4))
    if x is None:
        return False
    value, kind = g.values[x], g.int(0, 4)
    dims = value.ndim - 2
    kernel = [g.int(1, min(3, n)) for n in value.shape[2:]]
    strides = [g.int(1, 2) for _ in kernel]
    pads = [g.int(0, max(f - 1, 0)) for f in kernel] * 2
    spans: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "pads": pads}
    channels, out = value.shape[1], g.int(1, 4)
    if kind == 0:
        groups = channels if g.random.random() < 0.3 else 1
        w = g.weight((out * groups, channels // groups, *kernel))
        return g.add("Conv", [x, w, g.weight((out * groups,))], group=groups, **spans)
    if kind == 1:
        return g.add("ConvTranspose", [x, g.weight((channels, out, *kernel))], **spans)
    if kind == 2:
        return g.add("MaxPool", [x], ceil_mode=g.int(0, 1), **spans)
    if kind == 3:
        return g.add("AveragePool", [x], count_include_pad=g.int(0, 1), **spans)
    if g.random.random() < 0.5:
        kinds = ["GlobalAveragePool", *["GlobalMaxPool"] * (dims == 2)]  # of which the reference knows planes alone
        return g.add(str(g.random.choice(kinds)), [x])
    scales = g.store(np.array([1.0, 1.0, *[float(g.int(1, 2)) for _ in range(dims)]], np.float32))
    mode = str(g.random.choice(["nearest", "linear"]))
    return g.opset >= 13 and g.add("Resize", [x, "", scales], mode=mode)


def _types(g: Growing) -> bool:
    x = g.pick(lambda x: x.ndim > 0)
    if x is None:
        return False
    to = {"f": TensorProto.INT64, "i": TensorProto.FLOAT, "b": TensorProto.FLOAT}[g.values[x].dtype.kind]
    if g.values[x].dtype.kind == "f" and g.random.random() < 0.7:
        ends = [g.store(np.float32(end)) for end in (-0.5, 0.75)]
        return g.add("Clip", [x, *ends])
    return g.add("Cast", [x], to=to)


_FAMILIES = (_unary, _unary, _binary, _binary, _choice, _matmul, _shape, _shape, _parts, _parts, _reduction, _norm,
             _window, _types)  # fmt: skip


def _grow(seed: int) -> Growing:
    g = Growing(seed)
    for _ in range(g.int(1, 2)):
        g.input(g.random.choice(SIZES, size=g.int(1, 4)))
    wanted = g.int(3, 9)
    for _ in range(20 * wanted):
        if len(g.nodes) >= wanted:
            break
        before = dict(g.stored)
        if not _FAMILIES[g.int(0, len(_FAMILIES) - 1)](g):
            used = {name for node in g.nodes for name in node.input}
            g.stored = {name: x for name, x in g.stored.items() if name in before or name in used}
    return g


def model(seed: int) -> tuple[Case, str]:
    """A model with the outputs that ONNX Runtime, or else onnx's reference, gives, and its mode."""
    g = _grow(seed)
    outputs = [name for node in g.nodes for name in node.output if name not in g.read]
    inputs = {name: x for name, x in g.inputs.items() if name in g.read} or g.inputs
    used = {name for node in g.nodes for name in node.input}
    stored = {name: x for name, x in g.stored.items() if name in used}
    graph = helper.make_graph(
        g.nodes,
        f"random_{seed}",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in inputs.items()],
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(g.values[n].dtype), g.values[n].shape)
         for n in outputs],
        [numpy_helper.from_array(x, name) for name, x in stored.items()],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", g.opset)], ir_version=8)
    trains = any(x.dtype == np.float32 and x.ndim for x in stored.values()) and all(
        g.values[name].dtype == np.float32 for name in outputs
    )
    mode = "train" if trains and seed % 2 else "infer"
    case = Case(f"random_{seed}", proto, [([*inputs.values()], _wanted(proto, inputs))], RTOL, ATOL)
    return case, mode


def _wanted(proto: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(inputs)))
    except Exception:  # noqa: BLE001  # what it does not know
        return list(ReferenceEvaluator(proto).run(None, dict(inputs)))


def survey(seeds: Sequence[int], *, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """A row for each model, as it ends, planned for two processes."""
    for number, found in each_apart(_row, seeds, seconds=10 * TIME_OUT_S, jobs=jobs):
        if isinstance(found, str):
            what = "timed out" if found == LATE else "crashed"
            yield {"model": seeds[number], "mode": "", "outcome": what, "why": found, "cut": False, "operators": []}
        else:
            yield found


def _row(seed: int) -> dict[str, Any]:
    case, mode = model(seed)
    found = run_case(case, 2, mode)
    operators = sorted({node.op_type for node in case.model.graph.node})
    return {
        "model": seed,
        "mode": mode,
        "outcome": found.what,
        "why": found.why,
        "cut": found.cut,
        "operators": operators,
    }
