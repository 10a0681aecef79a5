"""Orders of passes, spelled out where they are short enough to read."""

from __future__ import annotations

from pdv.problem.workload import Order
from pdv.schedule.order import Pipeline, in_flight, orders


def spelled(pipeline: Pipeline, stage: int) -> str:
    return " ".join(f"{'b' if p.backward else 'f'}{p.micro_batch}.{p.chunk}" for p in orders(pipeline)[stage])


def test_one_forward_one_backward() -> None:
    shape = Pipeline(2, 1, 3, "1f1b")
    assert spelled(shape, 0) == "f0.0 f1.0 b0.0 f2.0 b1.0 b2.0"
    assert spelled(shape, 1) == "f0.1 b0.1 f1.1 b1.1 f2.1 b2.1"


def test_eager_runs_twice_as_many_forward_ahead() -> None:
    shape = Pipeline(2, 1, 4, "eager-1f1b")
    assert spelled(shape, 0) == "f0.0 f1.0 f2.0 b0.0 f3.0 b1.0 b2.0 b3.0"
    assert spelled(shape, 1) == spelled(Pipeline(2, 1, 4, "1f1b"), 1)


def test_gpipe_runs_all_forward_first() -> None:
    assert spelled(Pipeline(2, 1, 2, "gpipe"), 0) == "f0.0 f1.0 b0.0 b1.0"


def test_interleaved_takes_groups_of_as_many_micro_batches_as_stages() -> None:
    """Figure 4 of Narayanan et al. (SC'21): two stages, two chunks each."""
    shape = Pipeline(2, 2, 4, "interleaved")
    assert spelled(shape, 1).startswith("f0.1 f1.1 f0.3 b0.3 f1.3 b1.3 f2.1 b0.1")


def test_inference_runs_forward_alone() -> None:
    assert spelled(Pipeline(2, 1, 2, "1f1b", train=False), 1) == "f0.1 f1.1"


def test_activations_in_flight() -> None:
    """All micro-batches in GPipe, as many as there are stages behind in 1F1B, a little more interleaved."""

    def held(order: Order, virtual: int = 1) -> list[int]:
        return [in_flight(Pipeline(4, virtual, 16, order), stage) for stage in range(4)]

    assert held("gpipe") == [16] * 4
    assert held("1f1b") == [4, 3, 2, 1]
    assert held("eager-1f1b") == [7, 5, 3, 1]
    assert held("interleaved", 2) == [11, 9, 7, 5]
