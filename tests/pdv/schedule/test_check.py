"""No schedule waits for itself: neither as it is planned, nor with the sends and receives that torch puts in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pdv.problem.workload import ONE_EACH, RUN_ORDERS
from pdv.schedule.check import why_stuck
from pdv.schedule.order import Pipeline, in_flight, orders, why_not

LETTERS = {"all": "B", "values": "I", "weights": "W"}


def shapes() -> Iterator[Pipeline]:
    """Of every order that programs run."""
    for order in RUN_ORDERS:
        for stages in (2, 3, 4):
            for virtual in (1, 2, 3):
                for micro_batches in (1, 2, 3, 4, 6, 8, 12):
                    if not why_not(order, stages, virtual, micro_batches, recomputes=False):
                        yield Pipeline(stages, virtual, micro_batches, order)


def test_every_order_gets_through() -> None:
    found = list(shapes())
    assert {shape.order for shape in found} == set(RUN_ORDERS)
    for shape in found:
        assert not why_stuck(shape, orders(shape)), shape


def test_what_waits_for_itself_is_named() -> None:
    """Backward before its forward, a pass left out, a pass twice, another stage's chunk."""
    shape = Pipeline(2, 1, 2, "1f1b")
    first, second = orders(shape)
    assert "stage 0 waits before backward of micro-batch 1" in why_stuck(shape, (first[::-1], second))
    assert "stage 1 does not take micro-batch 1 once" in why_stuck(shape, (first, second[:-1]))
    assert "stage 1 does not take micro-batch 0 once" in why_stuck(shape, (first, (*second, second[0])))
    assert "stage 0 does not take" in why_stuck(shape, (second, first))
    zbv = Pipeline(2, 2, 4, "zbv")
    ours = [list(passes) for passes in orders(zbv)]
    weight = next(at for at, one in enumerate(ours[1]) if one.part == "weights")
    ours[1].insert(0, ours[1].pop(weight))
    assert "stage 1 waits before gradients of weights" in why_stuck(zbv, ours)


def test_a_step_that_ends_the_batch_before_begins_its_own() -> None:
    shape = Pipeline(3, 1, 4, "2bw")
    first = orders(shape)[0]
    assert [one.micro_batch for one in first if not one.backward] == [2, 3, 4, 5]
    assert [one.micro_batch for one in first if one.backward] == [0, 1, 2, 3]
    assert "stage 0 does not take micro-batch 0" in why_stuck(shape, orders(Pipeline(3, 1, 4, "1f1b")))
    assert [in_flight(shape, stage) for stage in range(3)] == [3, 2, 1]
    assert "2 micro-batches in the order 2bw on 3" in why_not("2bw", 3, 1, 2, recomputes=False)


def lowered(shape: Pipeline) -> dict[int, list[Any]]:
    """With sends and receives, by torch's own function."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    action = schedules._Action.from_str

    def spelled(rank: int) -> list[Any]:
        letters = [LETTERS[one.part] if one.backward else "F" for one in orders(shape)[rank]]
        passes = zip(letters, orders(shape)[rank], strict=True)
        return [action(f"{one.chunk}{letter}{one.micro_batch}") for letter, one in passes]

    return dict(  # type: ignore[no-any-return]
        schedules._add_send_recv(
            {rank: spelled(rank) for rank in range(shape.stages)},
            stage_to_rank=shape.layout.place_of,
            num_stages=shape.stages * shape.virtual,
        )
    )


def meet(actions: Sequence[list[str]]) -> list[list[str]]:
    """What is left of each rank's actions where a send waits until the other rank receives just that next."""
    left = [list(one) for one in actions]
    moved = True
    while moved:
        moved = False
        for own in left:
            while own and "SEND" not in own[0] and "RECV" not in own[0]:
                own.pop(0)
                moved = True
        heads = {one[0]: one for one in left if one}
        for text, own in list(heads.items()):
            if "SEND" in text:
                chunk, _, rest = text.partition("SEND_")
                other = int(chunk) + (1 if rest[0] == "F" else -1)
                theirs = heads.get(f"{other}RECV_{rest}")
                if theirs is not None and own[0] == text:
                    own.pop(0)
                    theirs.pop(0)
                    moved = True
                    break
    return left


def test_sends_and_receives_meet_in_one_order() -> None:
    """Even if each rank waits for each of its sends and receives, as no library does."""
    for shape in shapes():
        if shape.order not in ONE_EACH and shape.micro_batches <= 6:  # torch runs those without putting sends in
            actions = [[str(one) for one in own] for _, own in sorted(lowered(shape).items())]
            assert meet(actions) == [[]] * shape.stages, shape


def test_a_receive_too_early_is_seen() -> None:
    shape = Pipeline(2, 2, 4, "zbv")
    actions = [[str(one) for one in own] for _, own in sorted(lowered(shape).items())]
    swapped = [list(own) for own in actions]
    at = next(at for at, text in enumerate(swapped[0]) if "RECV" in text)
    swapped[0].insert(0, swapped[0].pop(at))
    assert any(meet(swapped))
