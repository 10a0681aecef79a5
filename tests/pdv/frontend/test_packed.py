"""Recurrent layers over packed sequences, as a batch of texts of several lengths has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import pdv
from ir.errors import ModelError
from pdv.frontend import load_program
from pdv.frontend.torch.tracing.packed import ALL_STEPS
from tests.pdv.as_modules import TOLERANCE, gap_of, plan_for_two
from tests.pdv.worlds import cluster

ROWS, STEPS, WIDTH, HIDDEN = 4, 5, 6, 4
X, LENGTHS = torch.randn(ROWS, STEPS, WIDTH), torch.tensor([3, 5, 1, 4])


class Ragged(nn.Module):
    """What ``after`` makes of the layer's outputs and states."""

    def __init__(self, layer: nn.RNNBase, after: Callable[[PackedSequence, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self._after = layer, after

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), self.layer.batch_first, enforce_sorted=False)
        packed = PackedSequence(packed.data.tanh(), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        outputs, state = self.layer(packed)
        hidden, cell = state if isinstance(state, tuple) else (state, state)
        return self._after(outputs, hidden, cell)


def padded(outputs: PackedSequence, *_: Tensor) -> Tensor:
    return pad_packed_sequence(outputs, batch_first=True, total_length=STEPS)[0]


def pooled(outputs: PackedSequence, *_: Tensor) -> Tensor:
    found, lengths = pad_packed_sequence(outputs, True, padding_value=-9.0)
    return found.amax(1) / lengths[:, None]


def last_states(_: PackedSequence, hidden: Tensor, cell: Tensor) -> Tensor:
    return torch.cat([hidden.transpose(0, 1), cell.transpose(0, 1)], -1)


CASES = {
    "lstm": (lambda: nn.LSTM(WIDTH, HIDDEN, batch_first=True), last_states),
    "lstm both ways": (lambda: nn.LSTM(WIDTH, HIDDEN, bidirectional=True, batch_first=True), last_states),
    "gru in layers": (lambda: nn.GRU(WIDTH, HIDDEN, 2, batch_first=True), padded),
    "projected": (lambda: nn.LSTM(WIDTH, HIDDEN, proj_size=3), padded),
    "rnn without biases": (lambda: nn.RNN(WIDTH, HIDDEN, bias=False, nonlinearity="relu", batch_first=True), pooled),
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_planned_and_cut_by_rows(case: str) -> None:
    torch.manual_seed(0)
    layer, after = CASES[case]
    module = Ragged(layer(), after)
    plan = pdv.optimize(module, (X, LENGTHS), cluster=cluster(2), pins={"mesh": {"x": 2}, "techniques": {"x": "ddp"}})
    assert plan.document["run"]["ranks"] == 2
    assert gap_of(plan, module, [X, LENGTHS]) < TOLERANCE
    assert gap_of(plan, module, [X.cos(), torch.tensor([5, 2, 2, 1])]) < TOLERANCE


def test_initial_states_are_in_the_order_of_the_rows() -> None:
    class Begun(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(WIDTH, HIDDEN, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor, begin: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            found: Tensor = self.gru(packed, begin[None])[1][-1]
            return found

    torch.manual_seed(0)
    module, given = Begun(), [X, LENGTHS, torch.randn(ROWS, HIDDEN)]
    assert gap_of(plan_for_two(module, given), module, given) < TOLERANCE


def test_steps_that_no_row_has_are_told_of() -> None:
    module = Ragged(nn.GRU(WIDTH, HIDDEN, batch_first=True), pooled)
    assert load_program(module, (X, LENGTHS)).notes == (ALL_STEPS,)
    assert load_program(Ragged(module.layer, padded), (X, LENGTHS)).notes == ()
    open_end = Ragged(module.layer, lambda outputs, *_: pad_packed_sequence(outputs, batch_first=True)[0])
    with pytest.raises(ModelError, match=r"not the module.*a total_length of x\.size\(1\)"):
        pdv.optimize(open_end, (X, torch.tensor([3, 4, 1, 2])), cluster=cluster(2))


def test_torchs_functions_are_their_own_again() -> None:
    module = Ragged(nn.LSTM(WIDTH, HIDDEN, batch_first=True), padded)
    load_program(module, (X, LENGTHS))
    packed = pack_padded_sequence(X, LENGTHS, batch_first=True, enforce_sorted=False)
    assert packed.batch_sizes.tolist() == [4, 3, 3, 2, 1]
    assert pad_packed_sequence(packed, batch_first=True)[0].shape == X.shape
    assert "forward" in vars(nn.LSTM)
    assert nn.LSTM.forward.__module__ == "torch.nn.modules.rnn"
