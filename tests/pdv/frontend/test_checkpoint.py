"""Weights from safetensors files: one, or several with an index; what is not well formed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pdv
from ir.errors import ModelError, UsageError, VerificationError, WeightsError
from pdv.frontend.checkpoint import read_checkpoint
from pdv.plan.package import import_package
from pdv.verification import verify
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.worlds import cluster


def write(folder: Path, state: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """A checkpoint as Hugging Face writes it; the path of its index."""
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: state[name].contiguous() for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def test_a_package_has_the_weights_of_the_checkpoint_and_gives_them_back(tmp_path: Path) -> None:
    module, source = settled(Gpt(1)), Gpt(1)
    state = {name: x for name, x in source.state_dict().items() if name != "head.weight"}  # tied: under either name
    state["wte.weight"] = state["wte.weight"].to(torch.bfloat16)
    plan = pdv.optimize(module, (ids(2, 8),), cluster=cluster(2), mesh={"x": 2}, weights=write(tmp_path, state))
    found = plan.build("cpu").full_state_dict()  # type: ignore[operator]  # of a package
    other = Gpt(1)
    other.load_state_dict(found)
    for name, x in other.state_dict().items():
        assert torch.equal(x, state.get(name, state["wte.weight"]).to(x.dtype)), name


def test_a_package_may_read_a_checkpoint_where_it_lies(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    state = {name: torch.randn_like(x) for name, x in module.state_dict().items()}
    state["1.bias"] = state["1.bias"].to(torch.bfloat16)  # is read in another type, and so copied
    x = torch.randn(2, 4)
    plan = pdv.optimize(module, (x,), cluster=cluster(2), mesh={"x": 2}, weights=write(tmp_path, state), check=False)
    folder = plan.save(tmp_path / "linked", link_weights=True)
    assert (folder / "weights.safetensors").stat().st_size < 400
    assert set(verify(folder)["files"]) >= {"model.py", "weights.safetensors"}
    found = import_package(folder).build("cpu").full_state_dict()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.float()), name
    copied = plan.save(tmp_path / "copied")
    same = json.loads((copied / "plan.json").read_text())["weights"]
    assert json.loads((folder / "plan.json").read_text())["weights"] == same
    write(tmp_path, {**state, "0.bias": state["0.bias"] + 1})
    with pytest.raises(VerificationError, match=r"0\.bias is another tensor than was linked"):
        verify(folder)
    verify(folder, allow_edits=True)
    index = folder / "weights.safetensors.index.json"
    index.write_text(index.read_text().replace("0.bias", "0.bia"))
    with pytest.raises(VerificationError, match=r"is not the index of the tensors"):
        verify(folder)


def test_only_a_checkpoint_is_linked(tmp_path: Path) -> None:
    plan = pdv.optimize(nn.Linear(4, 4), (torch.randn(2, 4),), cluster=cluster(2), check=False)
    with pytest.raises(UsageError, match="no checkpoint whose weights could be linked"):
        plan.save(tmp_path / "linked", link_weights=True)


def test_what_a_checkpoint_lacks_or_has_otherwise_is_named(tmp_path: Path) -> None:
    module = nn.Linear(4, 3)
    x = torch.randn(2, 4)

    def plan(**state: torch.Tensor) -> None:
        pdv.optimize(module, (x,), cluster=cluster(2), weights=write(tmp_path, state, 1), check=False)

    with pytest.raises(WeightsError, match=r"lacks 1 of 2 tensors \(bias\)"):
        plan(weight=torch.ones(3, 4))
    with pytest.raises(WeightsError, match=r"weight is float32 of shape \[4, 3\]"):
        plan(weight=torch.ones(4, 3), bias=torch.ones(3))
    with pytest.raises(WeightsError, match="bias is int64"):
        plan(weight=torch.ones(3, 4), bias=torch.ones(3, dtype=torch.int64))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": torch.ones(4), "b": torch.ones(2)}, 1)
    found = {name: entry.load().tolist() for name, entry in read_checkpoint(path).items()}
    assert found == {"a": [1.0] * 4, "b": [1.0] * 2}
    shard = next(tmp_path.glob("*.safetensors"))
    whole = shard.read_bytes()
    for broken in (whole[:-1], whole[:4], b"", b"\xff" * 40, whole.replace(b"F32", b"F99")):
        shard.write_bytes(broken)
        with pytest.raises(WeightsError, match="is no safetensors file"):
            read_checkpoint(path)
    for index in ('{"weight_map": {"a": "../a.safetensors"}}', '{"weight_map": 1}', "[" * 100_000, "{}"):
        path.write_text(index)
        with pytest.raises(WeightsError):
            read_checkpoint(path)
    with pytest.raises(WeightsError, match="does not exist"):
        read_checkpoint(tmp_path / "absent.safetensors")


def test_a_model_without_parameters_is_not_trained() -> None:
    frozen = nn.Linear(4, 3).requires_grad_(False)
    for module in (nn.ReLU(), frozen):
        with pytest.raises(ModelError, match="no parameters to train"):
            pdv.optimize(module, (torch.randn(2, 4),), cluster=cluster(2))
    assert pdv.optimize(frozen, (torch.randn(2, 4),), cluster=cluster(2), mode="infer")
