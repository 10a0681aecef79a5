"""A loop of torchtitan's sections trains on four processes as on one, and goes on under another plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.titan import main, read_config
from ir.errors import UsageError
from tests.distributed.harness import run_ranks
from tests.distributed.loops.plans import GPT2, LENGTH, ROWS, STEPS, gpt2_package

CONFIG = str(Path(__file__).parents[3] / "examples" / "titan.toml")
SIZES = (
    "--training.steps", str(STEPS), "--training.global_batch_size", str(ROWS), "--training.seq_len", str(LENGTH),
    "--data.vocabulary", str(GPT2["vocab_size"]), "--optimizer.lr", "3e-3", "--optimizer.eps", "1e-5",
)  # fmt: skip


@pytest.mark.distributed
@pytest.mark.slow
def test_twenty_steps_on_four_processes_are_those_of_one(tmp_path: Path) -> None:
    hybrid, pipeline = (gpt2_package(how, tmp_path) for how in ("hybrid", "pipeline"))
    whole = run_ranks(main, 1, str(hybrid), CONFIG, *SIZES, "--checkpoint.folder", str(tmp_path / "one"))[0]
    assert len(whole) == STEPS
    folder = tmp_path / "four"
    given = *SIZES, "--checkpoint.folder", str(folder), "--checkpoint.keep_latest_k", "1"
    begun = run_ranks(main, 4, str(hybrid), CONFIG, *given)
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-{STEPS}"]
    (tmp_path / "one" / f"step-{STEPS}").rename(tmp_path / "last")  # what is left is of half of the steps, on one
    gone_on = *SIZES, "--checkpoint.folder", str(tmp_path / "one")
    ended = run_ranks(main, 4, str(pipeline), CONFIG, *gone_on)
    for losses in begun:
        assert losses == pytest.approx(whole, abs=1e-4)
    for losses in ended:
        assert losses == pytest.approx(whole[STEPS // 2 :], abs=1e-4)


@pytest.mark.parametrize(
    "name",
    ["parallelism.tensor_parallel_degree", "activation_checkpoint.mode", "training.mixed_precision_param",
     "training.local_batch_size", "training.stepps", "comm.timeout"],
)  # fmt: skip
def test_what_cannot_be_told_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=name.replace(".", r"\.")):
        read_config(CONFIG, [f"--{name}", "2"])
