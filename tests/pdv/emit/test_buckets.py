"""Memory of summed gradients: taken again once nothing reads it, and never before."""

import torch
from torch import Tensor

from pdv.emit.templates.kernels.buckets import take_flat


def _join(flats: list[Tensor], value: float) -> Tensor:
    return take_flat(8, torch.zeros(()), flats).fill_(value)


def test_memory_is_taken_again_once_nothing_reads_it() -> None:
    flats: list[Tensor] = []
    address = _join(flats, 1.0).data_ptr()
    assert _join(flats, 2.0).data_ptr() == address


def test_what_is_read_still_is_left_alone() -> None:
    flats: list[Tensor] = []
    piece = _join(flats, 1.0)[3:]  # as the gradient of a parameter, which a loop keeps
    array = _join(flats, 2.0).numpy()
    running = _join(flats, 3.0)
    assert _join(flats, 4.0).data_ptr() != running.data_ptr()
    assert (piece.tolist(), array.tolist(), running.tolist()) == ([1.0] * 5, [2.0] * 8, [3.0] * 8)


def test_what_fits_no_more_is_let_go() -> None:
    flats: list[Tensor] = []
    _join(flats, 1.0)
    take_flat(2, torch.zeros(()), flats)
    assert [flat.numel() for flat in flats] == [2]
