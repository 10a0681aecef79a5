"""Arguments of calls from Python: what annotations do not admit is the caller's to mend, not a fault of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pdv
from ir.errors import PinsError, UsageError
from pdv.arguments import check_arguments
from tests.pdv.worlds import cluster

WRONG: list[tuple[str, Any, str]] = [
    ("mode", "Train", "Allowed: 'train', 'infer'. Did you mean 'train'"),
    ("pipelines", "sometimes", "Allowed: 'never', 'where-needed', 'always'"),
    ("batch", -1, "Allowed: a whole number of 1 or more, or None"),
    ("batch", 2.0, "a whole number"),
    ("stages", True, "stages=True. Allowed: a whole number"),
    ("micro_batches", "2", "a whole number"),
    ("memory_limit", "1 KiB", "a number of more than 0"),
    ("memory_limit", -1, "more than 0"),
    ("budget_s", "5s", "a number"),
    ("dims", [1], "a dict, from a text to True or False, or a number, or a list, of each: a number"),
    ("rules", [1], "a list, of each: a text, or a path"),
    ("cost", 1, "a text, or a path"),
    ("compiled", "yes", "True or False"),
    ("precision", None, "a text"),
    ("cluster", [], "a dict, from a text to anything, or a Cluster"),
    ("example_inputs", 1, "Allowed: a tensor, a tuple of arguments, or a dict by name"),
    ("mesh", {"dp": 2.0}, "a dict, from a text to a whole number"),
    ("mesh", {"dp": 0}, "0 is no size of the axis dp"),
    ("mesh", {"x": 1, "a b": 2}, "'a b' is no axis name"),
    ("mesh", {"class": 2}, "no Python keyword"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_what_an_argument_cannot_be_is_said(name: str, value: Any, said: str) -> None:
    given = {"example_inputs": torch.randn(4, 8), "cluster": cluster(2), name: value}
    with pytest.raises(UsageError) as caught:
        pdv.optimize(nn.Linear(8, 8), **given)
    assert said in str(caught.value)
    assert name in str(caught.value)


def test_axes_of_pins_are_named_as_those_of_the_command_line() -> None:
    for mesh, said in (({"x": 1, "a b": 2}, "pins, mesh: 'a b' is no axis name"), ({}, "pins, mesh: {} is no mesh")):
        with pytest.raises(PinsError, match=said):
            pdv.optimize(nn.Linear(8, 8), torch.randn(4, 8), cluster=cluster(2), pins={"mesh": mesh})


def test_numbers_of_numpy_are_numbers() -> None:
    check_arguments(pdv.optimize, "it", {"batch": np.int64(4), "budget_s": np.float32(2), "check": np.bool_(True)})
    check_arguments(pdv.optimize, "it", {"budget_s": 5, "rules": ("shipped", "none"), "model": None, "progress": 1})
