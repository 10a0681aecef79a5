"""Parts that forward converts to what they are already, as ``self.head.to(x.dtype)``, are as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.frontend import load_program


class Converting(nn.Module):
    """A router of Switch Transformers: its layer is converted in each call."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(self.dtype).to(x.device)
        return self.layer(x.to(self.dtype))  # type: ignore[no-any-return]


def test_a_conversion_to_the_same_type_is_none() -> None:
    module = Converting(torch.float32)
    program = load_program(module, (torch.randn(2, 4),))
    assert [param.attr("name") for param in program.graph.params] == ["layer.weight", "layer.bias"]


def test_another_type_is_refused_as_ever() -> None:
    with pytest.raises(ModelError, match="cannot be exported"):
        load_program(Converting(torch.bfloat16), (torch.randn(2, 4),))
