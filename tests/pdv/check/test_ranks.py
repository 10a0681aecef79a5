"""Simulated ranks: collectives are exact and strict, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pdv.check.collectives import DeviceMesh, Distributed
from pdv.check.placed import DTensor, Replicate, Shard
from pdv.check.ranks import CollectiveError, RankError, World

Worker = Callable[[Distributed, int], torch.Tensor]


def ranks(size: int, worker: Worker) -> list[list[float]]:
    world: World[torch.Tensor] = World(size)
    return [x.flatten().tolist() for x in world.run(lambda rank: worker(Distributed(world, rank), rank))]


def own(rank: int, count: int = 2) -> torch.Tensor:
    """[count]: 10 · rank, 10 · rank + 1, …"""
    return torch.arange(count, dtype=torch.float64) + 10 * rank


def test_collectives_are_exact() -> None:
    def all_reduce(dist: Distributed, rank: int) -> torch.Tensor:
        x = own(rank)
        dist.all_reduce(x)
        return x

    def gather(dist: Distributed, rank: int) -> torch.Tensor:
        y = torch.empty(6, dtype=torch.float64)
        dist.all_gather_into_tensor(y, own(rank))
        return y

    def scatter(dist: Distributed, rank: int) -> torch.Tensor:
        y = torch.empty(1, dtype=torch.float64)
        dist.reduce_scatter_tensor(y, own(rank, 3))
        return y

    def exchange(dist: Distributed, rank: int) -> torch.Tensor:
        y = torch.empty(3, dtype=torch.float64)
        dist.all_to_all_single(y, own(rank, 3))
        return y

    def broadcast(dist: Distributed, rank: int) -> torch.Tensor:
        x = own(rank)
        dist.broadcast(x, src=1)
        return x

    assert ranks(3, all_reduce) == [[30, 33]] * 3
    assert ranks(3, gather) == [[0, 1, 10, 11, 20, 21]] * 3
    assert ranks(3, scatter) == [[30], [33], [36]]
    assert ranks(3, exchange) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert ranks(3, broadcast) == [[10, 11]] * 3


def test_groups_of_the_same_ranks_have_an_order_each_and_one_together() -> None:
    def both(crossed: bool) -> Worker:
        def worker(dist: Distributed, rank: int) -> torch.Tensor:
            groups = [dist.new_subgroups_by_enumeration([[0, 1]])[0] for _ in range(2)]
            x = own(rank)
            for group in reversed(groups) if crossed and rank else groups:
                dist.all_reduce(x, group=group)
            return x

        return worker

    assert ranks(2, both(crossed=False)) == [[20, 24]] * 2
    with pytest.raises(RankError, match="wait for one another"):
        ranks(2, both(crossed=True))


def test_groups_of_a_device_mesh() -> None:
    found = [DeviceMesh(rank, (2, 3), ("dp", "tp")) for rank in range(6)]
    assert [mesh.get_coordinate()[1] for mesh in found] == [0, 1, 2, 0, 1, 2]
    assert found[4].get_group("dp").ranks == (1, 4)
    assert found[4].get_group("tp").ranks == (3, 4, 5)


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (lambda dist, rank: dist.all_reduce(own(rank, 2 + rank)), "all_reduce"),
        (lambda dist, rank: dist.all_reduce(own(rank)) if rank else dist.broadcast(own(rank)), "calls all_reduce"),
        (lambda dist, rank: dist.all_reduce(own(rank, 4)[::2]), "contiguous"),
        (lambda dist, rank: dist.all_gather_into_tensor(own(rank, 5), own(rank)), "does not fit"),
        (lambda dist, rank: dist.all_to_all_single(own(rank, 3), own(rank, 3)), "does not fit"),
        (lambda dist, rank: dist.all_reduce(own(rank).requires_grad_()), "gradient"),
        (lambda dist, rank: dist.all_reduce(own(rank)) if rank else None, "in all_reduce over all ranks for rank 0"),
        (lambda dist, rank: dist.send(own(rank), 1), "torch.distributed.send"),
    ],
)  # fmt: skip
def test_what_a_backend_would_refuse_or_hang_on_is_an_error(worker: Worker, message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks(2, worker)


def test_waiting_in_two_groups_for_one_another_is_an_error() -> None:
    def worker(dist: Distributed, rank: int) -> torch.Tensor:
        mesh = DeviceMesh(rank, (2, 2), ("a", "b"))
        for axis in ("a", "b") if rank in (0, 3) else ("b", "a"):
            dist.all_reduce(own(rank), group=mesh.get_group(axis))
        return own(rank)

    with pytest.raises(RankError) as caught:
        ranks(4, worker)
    assert isinstance(caught.value.__cause__, CollectiveError)
    assert "wait for one another" in str(caught.value)


def test_a_failing_rank_ends_all() -> None:
    def worker(dist: Distributed, rank: int) -> torch.Tensor:
        if rank == 2:
            raise ValueError("too bad")
        dist.all_reduce(own(rank))
        return own(rank)

    with pytest.raises(RankError, match="rank 2: too bad"):
        ranks(3, worker)


def test_gradients_of_a_placed_tensor_are_placed_alike() -> None:
    piece = DTensor.from_local(torch.ones(3), None, [Shard(0), Replicate()])
    parameter = torch.nn.Parameter(piece)
    assert isinstance(parameter, DTensor)
    torch.autograd.backward((parameter.to_local() * 2).sum())
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    assert gradient.placements == (Shard(0), Replicate())
    assert gradient.to_local().tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="DTensor"):
        parameter * 2
    with pytest.raises(TypeError, match="placed"):
        parameter.to_local(grad_placements=[Replicate(), Replicate()])
