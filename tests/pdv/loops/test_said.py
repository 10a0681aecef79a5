"""What a loop keeps in a checkpoint comes back as it was: of JSON alone schedules would go on otherwise."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn, optim

from ir.errors import UsageError
from pdv.loops.checkpoint import as_said, from_said

SCHEDULES = {
    "steps": lambda optimizer: optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
    "plateau": lambda optimizer: optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "cycle": lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_if_it_had_not_been_saved(name: str) -> None:
    rates = [[], []]
    for number, save in enumerate((False, True)):
        optimizer = optim.SGD(nn.Linear(2, 2).parameters(), 1.0)
        schedule = SCHEDULES[name](optimizer)
        for step in range(8):
            if save and step == 2:
                kept = from_said(json.loads(json.dumps(as_said({"schedule": schedule.state_dict()}), allow_nan=False)))
                schedule.load_state_dict(kept["schedule"])
            optimizer.step()
            schedule.step(*([float(step)] if name == "plateau" else []))
            rates[number].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


def test_all_that_is_taken_comes_back() -> None:
    kept = {
        "a": [1, None, True, "x", (2, {3: 4})],
        "b": {"pdv.float": 1},
        "c": -math.inf,
        "d": {(1, "y"): 0.5},
        "e": {},
    }
    assert from_said(json.loads(json.dumps(as_said(kept), allow_nan=False))) == kept
    assert math.isnan(from_said(as_said(math.nan)))


def test_what_is_no_json_is_named() -> None:
    with pytest.raises(UsageError, match=r"loop\['s'\]\[1\] cannot be written as JSON: it is of Tensor"):
        as_said({"s": [1, torch.ones(2)]})
