"""Recurrent layers over packed sequences, step by step over padded ones. Entry point: ``Unpacked``.

How many rows a packed sequence has at each step, values say. While a module is read, one holds ``data`` [b, t, …]
padded, and in the place of ``batch_sizes`` the length of each row; a layer keeps the state of rows that have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, pad
from torch.nn.utils import rnn

State = tuple[Tensor, ...]
"""[b, h] each: what a step hands on; of an LSTM the output and the cell."""
Step = Callable[[Tensor, State, Tensor], State]
"""(what the input gives the gates, the state before, what that gives the gates) -> the state behind."""


ALL_STEPS = (
    "rows that pad_packed_sequence gives have as many steps as those that were packed; torch leaves out steps that no "
    "row of a batch has. Pad batches to their longest row, or give it total_length=x.size(1)"
)
REMEDY = (
    "Give example inputs of which a row has all steps, or pad_packed_sequence a total_length of x.size(1): torch "
    "leaves out steps that no row has"
)
"""Where what was read is not the module."""


class Unpacked:
    """While this lasts, sequences are packed as said above, by whatever name a model calls torch's functions."""

    def __init__(self) -> None:
        self.notes: tuple[str, ...] = ()
        """What is to be said of the program, if packed rows were padded without saying to which length."""

    def __enter__(self) -> Unpacked:
        pairs = ((rnn.pack_padded_sequence, _pack_padded_sequence), (rnn.pad_packed_sequence, _pad_packed_sequence))
        self._called = [(function, function.__code__, function.__defaults__ or ()) for function, _ in pairs]
        self._plain = {layer: layer.forward for layer in (nn.LSTM, nn.GRU, nn.RNN)}
        for (function, _, defaults), (_, other) in zip(self._called, pairs, strict=True):
            function.__code__, function.__defaults__ = other.__code__, (*defaults, self)
        for layer, plain in self._plain.items():
            layer.forward = _forward_of(plain)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for function, code, defaults in self._called:
            function.__code__, function.__defaults__ = code, defaults
        for layer, plain in self._plain.items():
            layer.forward = plain  # type: ignore[method-assign]

    def pack(self, x: Tensor, lengths: Tensor | Sequence[int], *, batch_first: bool) -> rnn.PackedSequence:
        """Rows [b, t, …], or [t, b, …], of so many steps each."""
        data = x if batch_first else x.transpose(0, 1)
        return rnn.PackedSequence(data, torch.as_tensor(lengths, dtype=torch.int64))

    def pad(
        self, packed: rnn.PackedSequence, value: float, total: int | None, *, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        """Rows, and how long each is; behind its end stands ``value``."""
        x, lengths = packed.data, packed.batch_sizes
        behind, valid = [0, 0] * (x.dim() - 2), _valid(x, lengths)
        x = torch.where(valid.view(*valid.shape, *[1] * (x.dim() - 2)), x, value)
        if total is None:
            self.notes = (ALL_STEPS,)
        elif total <= x.shape[1]:
            x = x[:, :total]
        else:
            x = pad(x, (*behind, 0, total - x.shape[1]), value=value)
        return x if batch_first else x.transpose(0, 1), lengths


# Their text runs in the place of torch's, among torch's names; the last argument's default is the reader.


def _pack_padded_sequence(
    input: Any,  # noqa: A002  # its name is torch's
    lengths: Any,
    batch_first: bool,
    enforce_sorted: bool,
    reader: Unpacked,
) -> Any:
    return reader.pack(input, lengths, batch_first=batch_first)


def _pad_packed_sequence(
    sequence: Any, batch_first: bool, padding_value: float, total_length: int | None, reader: Unpacked
) -> Any:
    return reader.pad(sequence, padding_value, total_length, batch_first=batch_first)


def _valid(x: Tensor, lengths: Tensor) -> Tensor:
    """[b, t]: whether a row has the step."""
    return torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]


def _forward_of(plain: Callable[..., Any]) -> Callable[..., Any]:  # Any: what layers take and give
    def forward(self: nn.RNNBase, input: Tensor | rnn.PackedSequence, hx: Any = None) -> Any:  # noqa: A002
        return _run(self, input, hx) if isinstance(input, rnn.PackedSequence) else plain(self, input, hx)

    return forward


def _run(layer: nn.RNNBase, packed: rnn.PackedSequence, given: Any) -> tuple[rnn.PackedSequence, Any]:
    x, lengths = packed.data, packed.batch_sizes
    valid, count = _valid(x, lengths), 2 if layer.mode == "LSTM" else 1
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size][:count]
    places = layer.num_layers * (2 if layer.bidirectional else 1)
    if given is None:
        first = [[x.new_zeros(x.shape[0], width) for width in widths]] * places
    else:
        first = [[state[place] for state in (given if count > 1 else (given,))] for place in range(places)]
    last: list[State] = []
    for number in range(layer.num_layers):
        x = dropout(x, layer.dropout, layer.training) if number and layer.dropout else x
        found = []
        for suffix in ("", "_reverse") if layer.bidirectional else ("",):
            outputs, state = _pass(layer, f"_l{number}{suffix}", x, valid, tuple(first[len(last)]))
            found.append(outputs)
            last.append(state)
        x = torch.cat(found, -1) if len(found) > 1 else found[0]
    states = tuple(torch.stack(each) for each in zip(*last, strict=True))
    return rnn.PackedSequence(x, lengths), states if count > 1 else states[0]


def _pass(layer: nn.RNNBase, name: str, x: Tensor, valid: Tensor, state: State) -> tuple[Tensor, State]:
    """Outputs [b, t, h] of one direction of one layer, and its last state."""
    w_x, w_h = getattr(layer, f"weight_ih{name}"), getattr(layer, f"weight_hh{name}")
    b_x, b_h = (getattr(layer, f"bias_{which}{name}") if layer.bias else None for which in ("ih", "hh"))
    project = getattr(layer, f"weight_hr{name}") if layer.proj_size else None
    from_x, step, length = linear(x, w_x, b_x), _STEPS[layer.mode], x.shape[1]
    outputs: list[Tensor] = [x] * length
    for t in reversed(range(length)) if name.endswith("_reverse") else range(length):
        behind = step(from_x[:, t], state, linear(state[0], w_h, b_h))
        behind = behind if project is None else (linear(behind[0], project), *behind[1:])
        there = valid[:, t, None]
        state = tuple(torch.where(there, new, old) for new, old in zip(behind, state, strict=True))
        outputs[t] = torch.where(there, behind[0], 0.0)
    return torch.stack(outputs, 1), state


def _lstm(from_x: Tensor, state: State, from_h: Tensor) -> State:
    i, f, g, o = (from_x + from_h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(from_x: Tensor, state: State, from_h: Tensor) -> State:
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, -1), from_h.chunk(3, -1)
    n, z = (n_x + (r_x + r_h).sigmoid() * n_h).tanh(), (z_x + z_h).sigmoid()
    return ((state[0] - n) * z + n,)


_STEPS: dict[str, Step] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda from_x, _, from_h: ((from_x + from_h).tanh(),),
    "RNN_RELU": lambda from_x, _, from_h: ((from_x + from_h).relu(),),
}
