"""The contraction that fields are given agrees with NumPy's einsum."""

from __future__ import annotations

import numpy as np
import pytest

from ir.evaluation.floats import FloatField
from ir.evaluation.recording import Recorder

SPECS = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("...ij,kj->...ik", (2, 6, 3, 4), (5, 4)),
    ("...se,...te->...st", (2, 1, 3, 4), (2, 6, 5, 4)),
    ("nchw,nchw->c", (2, 3, 4, 5), (2, 3, 4, 5)),
    ("ab,cd->ad", (2, 3), (4, 5)),
    ("abc->ca", (2, 3, 4), None),
    ("i,j->ji", (3,), (4,)),
]


@pytest.mark.parametrize(("spec", "left", "right"), SPECS)
def test_agrees_with_numpy_forward_and_backward(
    spec: str, left: tuple[int, ...], right: tuple[int, ...] | None
) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, *shape)) for shape in (left, right) if shape is not None]
    tape = Recorder(FloatField(), 2)
    leaves = [tape.leaf(array, tracked=True) for array in arrays]
    result = tape.einsum(spec, *leaves)
    for world in range(2):
        np.testing.assert_allclose(result.data[world], np.einsum(spec, *(a[world] for a in arrays)), rtol=1e-12)
    cotangent = rng.normal(size=result.shape)
    grads, _ = tape.backward([(result, cotangent)])
    for at, array in enumerate(arrays):  # a sum of products is linear in each operand: the derivative is exact
        direction = rng.normal(size=array.shape)
        moved = [direction if i == at else a for i, a in enumerate(arrays)]
        change = sum((np.einsum(spec, *(a[w] for a in moved)) * cotangent[w]).sum() for w in range(2))
        assert (grads[leaves[at].slot] * direction).sum() == pytest.approx(change, rel=1e-10)
