"""Parameters by the names of the source: patterns, ties, joined and frozen ones, and near names of wrong ones."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pdv.emit.templates.runtime import Mesh, ParallelModule, Weights, join, make_mesh

TIED = {"wte.weight": ["head.weight", []]}


class Held(ParallelModule):
    """A tied weight, a part of one, two that are joined, one that is turned, and two buffers."""

    def __init__(self, mesh: Mesh, weights: Weights) -> None:
        super().__init__(mesh, ())
        self.head_weight = mesh.parameter(weights["head.weight"])
        self.qkv_0 = mesh.parameter(weights["h.0.qkv.weight"].narrow(0, 0, 2))
        self.qkv_1 = mesh.parameter(weights["h.0.qkv.weight"].narrow(0, 2, 2))
        self.a_b_bias = mesh.parameter(join(0, weights["h.0.a.bias"], weights["h.0.b.bias"]))
        self.weight_T = mesh.parameter(weights["h.1.weight"].permute(1, 0))
        self.base = mesh.buffer(weights["base.weight"])
        self.mean = mesh.buffer(weights["norm.running_mean"])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight_T


def held(folder: Path, frozen: list[str]) -> Held:
    names = ["head.weight", "h.0.qkv.weight", "h.0.a.bias", "h.0.b.bias", "h.1.weight", "base.weight"]
    tensors = {name: torch.ones(4, 4) for name in (*names, "norm.running_mean", "constants.mask")}
    save_file(tensors, folder / "w.safetensors", {"pdv": json.dumps({"names": TIED, "frozen": frozen})})
    return Held(make_mesh({}, "cpu"), Weights(folder / "w.safetensors"))


def test_parameters_by_the_names_of_the_source(tmp_path: Path) -> None:
    model = held(tmp_path, ["base.weight"])
    for each in (model, deepcopy(model)):
        own = {id(p): name for name, p in each.named_parameters()}

        def names(*patterns: str, each: Held = each, own: dict[int, str] = own) -> list[str]:
            return [own[id(p)] for p in each.parameters_of(*patterns)]

        assert names("wte.weight") == names("head.weight") == names("w*.weight", "head.*") == ["head_weight"]
        assert names("h.0.*") == ["qkv_0", "qkv_1", "a_b_bias"]
        assert names("*.bias", "h.1.weight") == ["a_b_bias", "weight_T"]
        assert each.head_weight.sources == ("head.weight", "wte.weight")  # type: ignore[attr-defined]
        assert each.a_b_bias.sources == ("h.0.a.bias", "h.0.b.bias")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h.1.wieght", r"no-such-parameter: 'h.1.wieght' .* such as h.1.weight"),
        ("*.gamma", r"no-such-parameter: '\*.gamma'"),
        ("constants.mask", "no-such-parameter"),
        ("weight_T", "no-such-parameter"),
        ("h.0.a.*", r"joined-parameter: .* with h.0.b.bias"),
        ("base.*", r"frozen-at-planning: base.weight: .*Plan the module with all that is ever trained unfrozen"),
        ("norm.running_mean", "not-a-parameter: norm.running_mean is a buffer"),
    ],
)
def test_names_of_nothing_that_is_trained_are_refused(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        held(tmp_path, ["base.weight"]).parameters_of(name)


def test_what_was_frozen_at_planning_is_not_thawed(tmp_path: Path) -> None:
    model = held(tmp_path, ["base.weight"]).requires_grad_(False)
    with pytest.raises(ValueError, match=r"frozen-at-planning: base.weight"):
        model.requires_grad_(True)
    assert all(p.requires_grad for p in held(tmp_path, []).requires_grad_(False).requires_grad_(True).parameters())


def test_gradients_are_under_all_names_of_the_source(tmp_path: Path) -> None:
    """A loop over ``source.named_parameters()`` has a tied weight by its first name, whichever is stored."""
    model = held(tmp_path, [])
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    found = model.full_gradients()
    assert found["wte.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert set(model.full_state_dict()) - set(found) == {"base.weight", "norm.running_mean"}
