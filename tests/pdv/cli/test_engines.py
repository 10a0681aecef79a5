"""`pdv export` and `pdv import`: what is written is what is read, round trips, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from ir.errors import UsageError
from pdv.cli import app as cli
from pdv.engines.engine import Engine, Reading, Target, narrow
from pdv.engines.formats.known import ENGINES
from pdv.manual.configuration import Configuration, complete, configuration
from pdv.problem.workload import Recompute

from .test_plan import ran
from .test_simulate import SMALL, refused, told

SETTINGS = (
    "", "tp=2,sp=1", "tp=8", "zero=1", "zero=2", "zero=3,recompute=full", "zero=3,shard=4", "tp=2,zero=3,shard=2",
    "pp=2", "pp=2,vp=2,schedule=interleaved", "pp=2,vp=4,schedule=interleaved,zero=1", "pp=4,schedule=gpipe",
    "cp=2,zero=3", "tp=4,cp=2", "pp=2,partition=4-4", "ep=2", "pp=2,partition=3-5", "tp=2,pp=2,recompute=selective",
    "precision=mixed-half-gradients", *(f"recompute={one}" for one in get_args(Recompute)),
)  # fmt: skip


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_what_is_read(engine: Engine, text: str, dtype: str) -> None:
    target = Target(dtype, 2, 4, on_gpus=True, layers=8, styles={"layers.*.up": "colwise"})
    given = complete(configuration(text).model_copy(update={"batch": 64}), 8)
    said, _ = narrow(engine, given, target)
    said = complete(said.model_copy(update={"dp": None}), 8)
    said, _ = narrow(engine, said, target)
    found = engine.read(engine.write(said, target), Reading(8, 8))
    assert Configuration.model_validate({"dp": said.dp, "batch": said.batch} | found.settings) == said
    assert found.dtype in (None, dtype)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1}', "a: [", "--x", "\x00", "[a", "- 1", "{" * 500])
@pytest.mark.parametrize("name", ENGINES)
def test_files_that_are_none(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        ENGINES[name].read(text, Reading(8, 8))


def test_there_and_back(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(capsys, "optimize", "two.onnx", "-c", "cluster.yaml", "-o", "data", "--mesh", "dp=2", "--no-cache")
    for name in ENGINES:
        out = f"{name}.out"
        exported = told(capsys, "export", "data", "--to", name, "-o", out)
        back = told(capsys, "import", out, "data", "--from", name)
        assert back["step_s"] == pytest.approx(exported["exported"]["step_s"], rel=0.01)
    assert "exists" in refused(capsys, "export", "data", "--to", "json", "-o", "json.out")
    said = json.loads(Path("json.out").read_text())
    assert said["configuration"]["dp"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "absent", "--to", "megatron"), "absent"),
        (("export", "absent", "--to", "megatrom"), "Did you mean 'megatron'?"),
        (("export", "absent", "--to", "json", "-o", "no/where.json"), "does not exist"),
        (("import", "absent.json", "absent"), "absent.json"),
        (("import", "pins.yaml", "-c", "cluster.yaml", "--arch", SMALL), "--from"),
    ],
)
def test_what_is_refused(here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    before = sorted(here.iterdir())
    assert cli.run(words) == 2
    assert said in capsys.readouterr().err
    assert sorted(here.iterdir()) == before


def test_accelerate_on_cpus_is_what_it_runs_there() -> None:
    """accelerate 1.15 runs DDP on CPUs whatever its file says, and of MULTI_CPU alone starts one process."""
    target = Target("float32", 1, 8, on_gpus=False, layers=8)
    engine = ENGINES["accelerate"]
    for text in ("zero=3", "tp=2", "cp=2,zero=3", "zero=2"):
        given = complete(configuration(text).model_copy(update={"batch": 64}), 8)
        said, lost = narrow(engine, given, target)
        assert (said.zero, said.tp, said.cp) == (0, 1, 1)
        assert any("CPUs" in one.why for one in lost)
    assert "MULTI_CPU" in engine.write(complete(said.model_copy(update={"dp": None}), 8), target)
    assert "--multi_gpu" in engine.start_line(target, "a.yaml")
    assert "--multi_gpu" not in engine.start_line(Target("float32", 1, 8, on_gpus=True), "a.yaml")
    found = engine.read("distributed_type: FSDP\nuse_cpu: true\nnum_processes: 8\nfsdp_config: {}\n", Reading(8, 8))
    assert found.settings["zero"] == 0
    assert "fsdp_config" in found.unpriced[0]


@pytest.mark.parametrize("batch", [16, 64])
def test_a_batch_beside_autotp_is_that_of_data_parallel_ranks(batch: int) -> None:
    """DeepSpeed itself asks for the batch of all ranks, 64 of 4 x 2 on 8, unless it is given an ``mpu``."""
    said = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": batch}
    text = json.dumps({**said, "tensor_parallel": {"autotp_size": 4}})
    found = ENGINES["deepspeed"].read(text, Reading(8, 8))
    assert (found.settings["batch"], found.settings["micro_batch"], found.settings["tp"]) == (16, 4, 4)
    with pytest.raises(UsageError, match="on 2 data-parallel ranks"):
        ENGINES["deepspeed"].read(text.replace(f": {batch}", ": 32"), Reading(8, 8))


def test_a_stage_from_none_is_told() -> None:
    target = Target("float32", 2, 4, on_gpus=True, layers=8)
    _, lost = narrow(ENGINES["accelerate"], complete(configuration("tp=2").model_copy(update={"batch": 64}), 8), target)
    assert "zero=0 becomes zero=3" in [one.what for one in lost]


def test_fsdp_as_the_plan_has_it_costs_what_the_plan_costs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model with layers, too: gradients are due where the plan's are."""
    Path("fsdp.yaml").write_text("techniques: {dp: fsdp}\n")
    words = ("--batch", "8", "--dtype", "float32", "--mesh", "dp=2", "--pins", "fsdp.yaml", "--rules", "none")
    sizes = "llama:layers=2,hidden=64,heads=4,seq=32,vocab=128,ffn=128"
    ran(capsys, "optimize", "--arch", sizes, "-c", "cluster.yaml", "-o", "data", "--no-cache", *words)
    exported = told(capsys, "export", "data", "--to", "json")
    assert exported["lost"] == []
    assert exported["exported"]["step_s"] == pytest.approx(exported["plan"]["step_s"], rel=1e-9)
