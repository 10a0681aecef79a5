"""What ONNX's recurrent layers become: their cells, written out step by step.

x: [steps, batch, inputs], weights: [directions, gates * hidden, inputs], as ONNX stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ir.graph import Node
from pdv.frontend import layers, masks
from pdv.frontend.lowering import Lowering, Unsupported
from pdv.frontend.onnx.call import Call, Handler
from pdv.frontend.onnx.schema import dtype_of

_ACTIVATIONS = {"tanh", "sigmoid", "relu", "softplus"}
MOST_STEPS = 256  # that are written out
State = tuple[Node, ...]
Cell = Callable[["Weights", Node, State], State]
"""(weights, a step's input [b, i], state before) -> state after; the first of it is what the layer gives."""


class Weights:
    """Those of one direction: [gates * hidden, inputs], [gates * hidden, hidden], and two biases."""

    def __init__(self, c: Call, direction: int, gates: int, activations: Sequence[str]) -> None:
        self.activations = activations
        self.k, self.gates = c.k, gates
        self.hidden = int(c.attrs["hidden_size"])
        self.w, self.r = (c.k.select(c[i], 0, direction) for i in (1, 2))
        self.both: tuple[Node, Node] | None = None
        if (bias := c.get(3)) is not None:
            first, second = c.k.split(c.k.select(bias, 0, direction), 0, (gates * self.hidden,) * 2)
            self.both = first, second
        self.peepholes: tuple[Node, ...] | None = None
        self.reset_after = False
        self.bound: float | None = None

    def activate(self, number: int, x: Node) -> Node:
        """What goes into a gate, if bounded within that, by one of the layer's activations."""
        x = x if self.bound is None else masks.clamp(self.k, x, -self.bound, self.bound)
        return self.k.apply(self.activations[number], x)

    def parts(self, y: Node) -> tuple[Node, ...]:
        """[b, gates * hidden] by gates."""
        return self.k.split(y, 1, (self.hidden,) * self.gates)

    def of_input(self, x: Node) -> tuple[Node, ...]:
        """What the input gives each gate."""
        return self.parts(layers.linear(self.k, x, self.w, self.both[0] if self.both else None))

    def of_state(self, h: Node) -> tuple[Node, ...]:
        """What the state gives each gate."""
        return self.parts(layers.linear(self.k, h, self.r, self.both[1] if self.both else None))


def _rnn(weights: Weights, x: Node, state: State) -> State:
    (a,), (b,) = weights.of_input(x), weights.of_state(state[0])
    return (weights.activate(0, weights.k.add(a, b)),)


def _lstm(weights: Weights, x: Node, state: State) -> State:
    k, (h, c) = weights.k, state
    i, o, f, g = (k.add(a, b) for a, b in zip(weights.of_input(x), weights.of_state(h), strict=True))
    if weights.peepholes is not None:
        into, _, keep = weights.peepholes
        i, f = k.add(i, k.mul(into, c)), k.add(f, k.mul(keep, c))
    i, f = weights.activate(0, i), weights.activate(0, f)
    c = k.add(k.mul(f, c), k.mul(i, weights.activate(1, g)))
    if weights.peepholes is not None:
        o = k.add(o, k.mul(weights.peepholes[1], c))
    end = k.apply(weights.activations[2], c)  # a state is no input of a gate: ONNX Runtime does not bound it
    return k.mul(weights.activate(0, o), end), c


def _gru(weights: Weights, x: Node, state: State) -> State:
    k, (h,) = weights.k, state
    z, r, n = weights.of_input(x)
    of_z, of_r, of_n = weights.of_state(h)
    z, r = weights.activate(0, k.add(z, of_z)), weights.activate(0, k.add(r, of_r))
    if weights.reset_after:
        inner = k.mul(r, of_n)
    else:
        rows = k.slice(weights.r, 0, 2 * weights.hidden, 3 * weights.hidden)
        bias = None if weights.both is None else k.slice(weights.both[1], 0, 2 * weights.hidden, 3 * weights.hidden)
        inner = layers.linear(k, k.mul(r, h), rows, bias)
    n = weights.activate(1, k.add(n, inner))
    return (k.add(n, k.mul(z, k.sub(h, n))),)


def recurrent(cell: Cell, gates: int, states: int, activations: Sequence[str]) -> Handler:
    """The reader of a layer of such cells, with the activations that they have where nothing else is said."""

    def handle(c: Call) -> tuple[Node, ...]:
        k = c.k
        batch_first = bool(c.attrs.get("layout", 0))
        x = k.transpose(c[0], 0, 1) if batch_first else c[0]
        steps, batch = x.type.shape[:2]
        direction = c.attrs["direction"]
        ways = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
        said = [name.lower() for name in c.attrs.get("activations", ())] or [*activations] * len(ways)
        said = said[: len(activations) * len(ways)]  # the schema's default is of two directions
        if unknown := set(said) - _ACTIVATIONS:
            raise Unsupported(f"a recurrent layer of {sorted(unknown)}")
        if c.get(4) is not None and not (c.array(4) == steps).all():
            raise Unsupported("sequences of several lengths")
        if steps > MOST_STEPS:
            raise Unsupported(f"a recurrent layer of more than {MOST_STEPS} steps")
        before = _states(c, states, len(ways), batch, batch_first=batch_first)
        rows, last = [], []
        for way, is_reverse in enumerate(ways):
            weights = Weights(c, way, gates, said[way * len(activations) : (way + 1) * len(activations)])
            weights.reset_after = bool(c.attrs.get("linear_before_reset", 0))
            weights.bound = c.attrs.get("clip")
            if states == 2 and c.get(7) is not None:
                weights.peepholes = k.split(k.select(c[7], 0, way), 0, (weights.hidden,) * 3)
            state, found = tuple(k.select(each, 0, way) for each in before), []
            order = range(steps)[::-1] if is_reverse else range(steps)
            for step in order:
                state = cell(weights, k.select(x, 0, step), state)
                found.append(state[0])
            rows.append(_stacked(k, found[::-1] if is_reverse else found, 0))
            last.append(state)
        y = _stacked(k, rows, 1)  # [steps, directions, batch, hidden]
        ends = [_stacked(k, [state[i] for state in last], 0) for i in range(states)]
        if batch_first:
            return k.permute(y, (2, 0, 1, 3)), *(k.transpose(end, 0, 1) for end in ends)
        return y, *ends

    return handle


def _states(c: Call, states: int, ways: int, batch: int, *, batch_first: bool) -> list[Node]:
    """Each [directions, batch, hidden]: those given, or zeros."""
    shape = (ways, batch, int(c.attrs["hidden_size"]))
    found = []
    for place in (5, 6)[:states]:
        given = c.get(place)
        if given is None:
            found.append(masks.fill(c.k, 0, shape, c[0].type.dtype))
        else:
            found.append(c.k.transpose(given, 0, 1) if batch_first else given)
    return found


def _stacked(k: Lowering, xs: Sequence[Node], dim: int) -> Node:
    shape = xs[0].type.shape
    return k.concat([k.reshape(x, (*shape[:dim], 1, *shape[dim:])) for x in xs], dim)


def eye_like(c: Call) -> Node:
    """Ones on a diagonal; in the operand's type."""
    x = c[0]
    rows, columns = x.type.shape
    dtype = dtype_of(c.attrs["dtype"]) if "dtype" in c.attrs else x.type.dtype
    return c.k.const(np.eye(rows, columns, k=int(c.attrs["k"])).astype(dtype.torch_name), dtype)


READERS: Mapping[str, Handler] = {
    "RNN": recurrent(_rnn, 1, 1, ("tanh",)),
    "LSTM": recurrent(_lstm, 4, 2, ("sigmoid", "tanh", "tanh")),
    "GRU": recurrent(_gru, 3, 1, ("sigmoid", "tanh")),
    "EyeLike": eye_like,
}
