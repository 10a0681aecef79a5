"""The text of a pipeline can be run at small sizes: blocks that stages share change their sizes together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pdv
from pdv.check.small import small_pair
from pdv.check.text import same_structure, tokens
from pdv.emit.emission import shapes_in
from tests.pdv.miniatures import Gpt, S, V
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster


def test_stages_have_one_class_of_blocks_at_small_sizes_too() -> None:
    plan = plan_pipeline(
        Gpt(4), (torch.randint(0, V, (8, S)),), cluster(4), stages=2, micro_batches=2, mesh={"dp": 2}
    )  # fmt: skip
    shape_of = shapes_in(plan.weights)
    text = plan.emission.body(shape_of)
    small = small_pair(plan.source, plan.emission, shape_of).text(plan.emission, shape_of)
    assert "class Block(" in text
    assert small != text
    assert same_structure(tokens(text), tokens(small))


class WithInput(nn.Module):
    """Two layers, and what they were given beside what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.other(torch.relu(self.one(x))), x


def test_the_last_stage_takes_an_input_that_it_returns() -> None:
    plan = pdv.optimize(WithInput(), (torch.randn(8, 8),), cluster=cluster(2), stages=2, micro_batches=2)
    text = plan.emission.body(shapes_in(plan.weights))
    assert "class Stage1(" in text
    assert ", x\n" in text.partition("class Stage1(")[2]
