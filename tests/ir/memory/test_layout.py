"""Views are possible exactly where torch finds them."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

from ir.memory.layout import Layout, fresh, like, merge_strides

SHAPES = [(4, 6), (2, 3, 4), (24,), (1, 24), (2, 1, 12), (6, 4, 1), (3, 8), (2, 2, 6), (12, 2), (2, 3, 2, 2)]


@pytest.mark.parametrize("before", SHAPES)
def test_merging_dims_is_what_torch_does(before: tuple[int, ...]) -> None:
    for perm in permutations(range(len(before))):
        x = torch.empty(before).permute(perm)
        layout = Layout(tuple(x.shape), x.stride())
        for after in SHAPES:
            found = merge_strides(layout, after)
            try:
                expected = x.view(after)
            except RuntimeError:
                assert found is None, (before, perm, after)
                continue
            assert found is not None, (before, perm, after)
            sized = [place for place, size in enumerate(after) if size > 1]
            assert [found[i] for i in sized] == [expected.stride(i) for i in sized], (before, perm, after)


def test_contiguous_and_dense() -> None:
    assert fresh((2, 3, 4)).contiguous
    turned = Layout((4, 3), (1, 4))
    assert turned.dense
    assert not turned.contiguous
    assert not Layout((2, 3), (6, 1)).dense  # a slice leaves holes
    assert not Layout((2, 3), (0, 1)).dense  # spread out, rows overlap


def test_elementwise_results_lie_as_their_operand() -> None:
    turned = Layout((4, 3), (1, 4))
    assert like((4, 3), [fresh((3,)), turned]) == turned
    assert like((4, 3), [Layout((4, 3), (6, 1))]) == fresh((4, 3))


def test_elements() -> None:
    assert fresh((2, 3)).elements == math.prod((2, 3))
