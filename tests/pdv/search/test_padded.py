"""Products whose rows tensor cores do not read as they lie: padded where that is faster, and equal to the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pdv
from pdv.cluster import load_cluster

ROWS, WIDTH, WORDS = 2048, 256, 5003


class Head(nn.Module):
    """[b] -> [b, 5003]: what is looked up, and compared with all there is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids)) @ self.table.weight.T  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("device", "dtype", "count", "padded"),
    [("h100-80gb-sxm", "bfloat16", 1, True), ("h100-80gb-sxm", "bfloat16", 2, True),
     ("h100-80gb-sxm", "float32", 1, False), ("cpu-core", "bfloat16", 1, False)],
)  # fmt: skip
def test_rows_are_padded_where_units_read_them_so(device: str, dtype: str, count: int, padded: bool) -> None:
    cluster = load_cluster({"nodes": [{"devices": count, "device": device, "link": "nvlink4"}]})
    ids = torch.arange(ROWS) % WORDS
    plan = pdv.optimize(Head().train(), (ids,), cluster=cluster, dtype=dtype, cost="analytic", cache=None)
    assert ("pad-linear" in str(plan.document["derivation"])) == padded
