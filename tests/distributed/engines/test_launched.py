"""Exported plans train in their engines as on one process: `examples/engines/launch.py`, without engines left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.engines.launch import CLOSE, RUNS, launch, losses_of, run

HERE = Path(__file__).parents[3] / "examples" / "engines"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    pytest.importorskip("transformers")
    return losses_of(run([str(HERE / "tiny.py")], tmp_path_factory.mktemp("one")))[0]


SAID = {
    "ddp-accelerate": "MULTI_CPU on 2 processes, DistributedDataParallel",
    "fsdp-transformers": "DTensor of (64, 64), (32, 64) on each of 2 ranks",
    "tp-transformers": "DTensor of (64, 64), (32, 64) on each of 2 ranks",
    "pp-pytorch": "1F1B of 4 micro-batches on 2 stages",
    "ddp-torchtitan": "2 layers, (128, 64) of (128, 64) on each of 2 ranks",
    "fsdp-torchtitan": "2 layers, (64, 64) of (128, 64) on each of 2 ranks",
    "tp-torchtitan": "2 layers, (64, 64) of (128, 64) on each of 2 ranks",
    "pp-torchtitan": "Schedule1F1B, 1 layers, (128, 64) of (128, 64) on each of 2 ranks",
    "tp-megatron": "GPTModel, (64, 64) of (64, 128) on each of 2 ranks",
    "ddp-deepspeed": "ZeRO stage 0 on 2 processes",
    "zero3-deepspeed": "ZeRO stage 3 on 2 processes",
    "tp-deepspeed": "AutoTP, (64, 64) of a product on each of 2 ranks",
    "pp-deepspeed": "PipelineModule of 2 stages, 4 micro-batches",
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_plan_trains_in_its_engine(
    name: str, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(RUNS[name].needs)
    monkeypatch.syspath_prepend(str(HERE))
    losses, how = launch(name, tmp_path)
    assert how == SAID[name]
    assert losses == pytest.approx(expected, abs=CLOSE)


def test_the_script_lists_its_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "launch.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert set(SAID) == set(RUNS)
    for name in RUNS:
        assert name in done.stdout
