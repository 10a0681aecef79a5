"""What is exported is read by the engines' own loaders as it was meant; without an engine its test is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdv.engines.engine import Target, narrow
from pdv.engines.formats.known import ENGINES
from pdv.manual.configuration import Configuration, complete, configuration

PLANS = {
    "ddp": "", "fsdp": "zero=3", "hsdp": "zero=3,shard=4", "tp": "tp=4", "tpsp": "tp=4,sp=1,recompute=full",
    "pp": "pp=2,vp=2,schedule=interleaved", "free": "tp=2,pp=2,zero=2",
}  # fmt: skip
STYLES = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
LOADERS = Path(__file__).with_name("loaders.py")


def loaded(name: str, dtype: str, folder: Path) -> list[tuple[Configuration, Any]]:
    """What is written for each of the plans, and what the engine's loader says of it."""
    written, engine = {}, ENGINES[name]
    for plan, text in PLANS.items():
        target = Target(dtype, 2, 4, on_gpus=True, layers=8, styles=STYLES)
        given = complete(configuration(text).model_copy(update={"batch": 64}), 8)
        said, _ = narrow(engine, given, target)
        said = complete(said.model_copy(update={"dp": None}), 8)
        said, _ = narrow(engine, said, target)
        (folder / plan).write_text(engine.write(said, target))
        written[plan] = said
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", str(LOADERS), name, *PLANS]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return [(said, found[plan]) for plan, said in written.items()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accelerate(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for said, found in loaded("accelerate", dtype, tmp_path):
        cuts = said.zero > 0 or said.tp > 1
        assert (found["kind"], found["devices"]) == ("FSDP" if cuts else "MULTI_GPU", 8)
        assert found["precision"] == ("no" if dtype == "float32" else "bf16")
        if cuts:
            assert (found["version"], found["resharded"]) == (2, said.zero != 2)
        if "tp_size" in found:
            sizes = said.data // (said.shard or said.data), said.shard or said.data, said.tp
            assert sizes == (found["dp_replicate_size"], found["dp_shard_size"], found["tp_size"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed")
    for said, found in loaded("hf-tp-plan", dtype, tmp_path):
        assert found["tp_size"] == said.tp
        assert found["fsdp_size"] * found["dp_replicate_size"] == said.data
        assert found["tp_plan"] == (STYLES if said.tp > 1 else found["tp_plan"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepspeed(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    for said, found in loaded("deepspeed", dtype, tmp_path):
        counted = 64 * said.tp  # it takes ranks of AutoTP for data-parallel ones
        assert (found["stage"], found["batch"]) == (said.zero, counted)
        assert (found["micro_batch"], found["steps"]) == (said.micro_batch, said.micro_batches)
        assert found["bfloat16"] == (dtype == "bfloat16")


def test_torchtitan(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    for said, found in loaded("torchtitan", "bfloat16", tmp_path):
        assert (found["tp"], found["pp"], found["cp"], found["batch"]) == (said.tp, said.pp, said.cp, 64)
        assert found["copies"] * found["shard"] == said.data
        assert found["sp"] == (said.sp or said.tp == 1)
        if said.zero:
            assert found["resharded"] == ("never" if said.zero == 2 else "always")
