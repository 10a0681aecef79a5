"""Numbers of rows among features of floats: columns of one input that a model makes integers, and looks up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pdv
from ir.evaluation.id_ranges import are_computed, ranges_of
from pdv.check.reference import whole_and_more
from pdv.frontend import load_program
from tests.pdv.as_modules import TOLERANCE, gap_of, plan_for_two
from tests.pdv.worlds import cluster

TABLES, DENSE, WIDTH = (11, 7), 2, 4


class Features(nn.Module):
    """As DeepCTR has it: ``x`` [b, 2 + 2] holds a number of each table, and two numbers beside."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, WIDTH) for rows in TABLES])
        self.out = nn.Linear(len(TABLES) * WIDTH + DENSE, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = [table(x[:, i : i + 1].long()) for i, table in enumerate(self.tables)]
        return self.out(torch.cat([torch.cat(found, -1).flatten(1), x[:, len(TABLES) :]], -1))  # type: ignore[no-any-return]


class Offset(nn.Module):
    """One table for all columns, each from a row of its own on."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(sum(TABLES), WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("first", torch.tensor([0, TABLES[0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x[:, :2].to(torch.int32) + self.first).sum(1))  # type: ignore[no-any-return]


def features(rows: int) -> Tensor:
    ids = [torch.randint(0, size, (rows, 1)).float() for size in TABLES]
    return torch.cat([*ids, torch.randn(rows, DENSE)], 1)


@pytest.mark.parametrize("kind", [Features, Offset])
def test_columns_of_floats_look_up_rows(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind()
    plan = plan_for_two(module, [features(8)])
    assert plan.document["run"]["ranks"] == 2
    assert gap_of(plan, module, [features(8)]) < TOLERANCE


def test_other_rows_and_ids_beyond_a_table() -> None:
    torch.manual_seed(0)
    module = Features()
    program = plan_for_two(module, [features(8)]).build("cpu")
    x = features(5)
    torch.testing.assert_close(program(x), module(x))
    x[0, 1] = TABLES[1]
    with pytest.raises(IndexError):
        program(x)


def test_ids_are_drawn_below_the_least_table() -> None:
    graph = load_program(Features(), (features(8),)).graph
    (found,) = ranges_of(graph).values()
    assert found == (0, min(TABLES))
    drawn = whole_and_more(np.random.default_rng(0), found, (100,))
    assert {int(x) for x in drawn} == set(range(min(TABLES)))
    assert (drawn != drawn.astype(int)).all()
    assert not any(are_computed(node.operands[1]) for node in graph.nodes if node.op.kind == "index")


@pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"precision": "mixed"}, {"dtype": "float16"}])
def test_types_that_lack_whole_numbers_are_refused(how: dict[str, str]) -> None:
    with pytest.raises(pdv.UsageError, match="'x' holds numbers of rows as floats"):
        pdv.optimize(Features(), (features(8),), cluster=cluster(2), **how)  # type: ignore[arg-type]  # a keyword each
