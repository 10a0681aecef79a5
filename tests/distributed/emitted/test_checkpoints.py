"""Weights written as safetensors by two processes: the source's names, files of bounded size, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import pdv
from pdv.plan.package import import_package
from tests.distributed.harness import run_ranks
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.pipelined import plan_pipeline
from tests.pdv.worlds import cluster

pytestmark = pytest.mark.distributed
INDEX = "model.safetensors.index.json"
MOST = 3000  # bytes of a file


def package(how: str, folder: Path) -> Path:
    """Gpt, its embedding tied, on two devices."""
    module, inputs = settled(Gpt(2)), (ids(8, 8),)
    if how == "pipeline":
        plan = plan_pipeline(module, inputs, cluster(2), stages=2, micro_batches=2, mesh={"dp": 1})
    else:
        axis, technique = ("tp", "tensor") if how == "tensor" else ("dp", "zero-3")
        pins = {"mesh": {axis: 2}, "techniques": {axis: technique}}
        plan = pdv.optimize(module, inputs, cluster=cluster(2), pins=pins)
    return plan.save(folder / "gpt_pdv")


def train_and_save(built: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after a step, and those that are read back from what was written of them."""
    model = import_package(built).build(device="cpu")
    x = ids(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train_step(x, x, lambda y, wanted: (F.cross_entropy(y.flatten(0, 1), wanted.flatten(), reduction="sum"), 64))
    optimizer.step()
    trained = {name: tensor.clone() for name, tensor in model.full_state_dict().items()}
    model.save_safetensors(folder / "sharded", max_shard_bytes=MOST)
    model.save_safetensors(folder / "single")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_safetensors(folder / "sharded")
    return trained, model.full_state_dict()


@pytest.mark.parametrize("how", ["tensor", "zero-3", "pipeline"])
def test_what_two_processes_write_loads_into_the_source_and_back(how: str, tmp_path: Path) -> None:
    built = package(how, tmp_path)
    results = run_ranks(train_and_save, 2, built, tmp_path)
    source = Gpt(2).state_dict()
    weight_map: dict[str, str] = json.loads((tmp_path / "sharded" / INDEX).read_text())["weight_map"]
    sharded: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        path = tmp_path / "sharded" / file
        part = load_file(path)
        assert len(part) == 1 or sum(x.nbytes for x in part.values()) <= MOST
        assert {name for name, where in weight_map.items() if where == file} == set(part)
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        sharded |= part
    assert sorted(path.name for path in (tmp_path / "sharded").iterdir()) == sorted({*weight_map.values(), INDEX})
    for state in (
        sharded,
        load_file(tmp_path / "single" / "model.safetensors"),
        *(x for pair in results for x in pair),
    ):
        assert set(state) == set(source)
        for name, tensor in results[0][0].items():
            assert torch.equal(state[name], tensor), name
    Gpt(2).load_state_dict(sharded)


def save_twice(built: Path, folder: Path) -> list[str]:
    """What is said of a second file in the same place, and of a folder that cannot be."""
    model = import_package(built).build(device="cpu")
    model.save_safetensors(folder / "once")
    said = []
    for place in ("once", "file"):
        with pytest.raises(OSError, match="not-saved") as caught:
            model.save_safetensors(folder / place)
        said.append(str(caught.value))
    model.save_safetensors(folder / "once", overwrite=True, max_shard_bytes=MOST)
    return said


def test_all_ranks_hear_what_rank_0_could_not_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for said in run_ranks(save_twice, 2, package("tensor", tmp_path), tmp_path):
        assert "is there already: choose another folder, or pass overwrite=True" in said[0]
        assert "File exists" in said[1]
    assert not (tmp_path / "once" / "model.safetensors").exists()


def test_transformers_reads_what_was_written(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    config.use_cache = False
    source: Any = GPT2LMHeadModel(config).eval()
    x = ids(2, 8)
    plan = pdv.optimize(source, {"input_ids": x}, cluster=cluster(2), mode="train", check=False)
    model: Any = plan.build("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_safetensors(tmp_path, max_shard_bytes=10_000)
    config.save_pretrained(tmp_path)
    read: Any = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(read(x).logits, model(x))
