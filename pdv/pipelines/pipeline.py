"""One candidate's inside as a pipeline: its cut, and what a step of it takes by arithmetic. Entry: ``Whole``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from pdv.cluster import Cluster, Link
from pdv.cluster.routing.route import find_route
from pdv.pipelines.candidates import Candidate
from pdv.pipelines.cuts import cut_pieces, held_bytes, once_seconds, stage_costs
from pdv.pipelines.profile import ByStage, Numbers, Profile
from pdv.problem.workload import Order, Recompute, Stages
from pdv.schedule.order import Pipeline, in_flight
from pdv.schedule.pieces import Pieces


@dataclass(frozen=True)
class Mode:
    """How micro-batches run, beside where."""

    recompute: Recompute = "none"
    order: Order = "1f1b"


@dataclass(frozen=True)
class Whole:
    """A candidate with what its pieces take on each stage."""

    candidate: Candidate
    profiles: ByStage
    cluster: Cluster
    mode: Mode

    def cut(self, limit: float, last: float | None = None) -> tuple[int, ...] | None:
        """Pieces of each stage, so that the slowest is fastest; None if nothing is within so many bytes a device.

        ``last``: the limit of the last stage, where it is another.
        """
        candidate, links = self.candidate, self.links
        limits = [*[limit] * (candidate.stages - 1), limit if last is None else last]
        if candidate.stages == 1:
            whole = (self.profiles[0].count,)
            return whole if self.held(whole)[0] <= limits[0] else None
        costs: dict[tuple[object, ...], Numbers] = {}
        of_stage, flight = [], self.flight
        for stage, kind in enumerate(self.profiles.kind_of):
            key = kind, flight[stage], links[stage], links[stage + 1], limits[stage]
            if key not in costs:
                costs[key] = stage_costs(
                    self.profiles[stage],
                    micro_batches=candidate.micro_batches,
                    in_flight=flight[stage],
                    limit=limits[stage],
                    recompute=self.again,
                    before=links[stage],
                    behind=links[stage + 1],
                )
            of_stage.append(costs[key])
        return cut_pieces(of_stage)

    @property
    def again(self) -> bool:
        """Whether forward runs again in backward."""
        return self.mode.recompute == "full"

    @property
    def flight(self) -> list[int]:
        """By stage, micro-batches whose activations are held at once."""
        candidate = self.candidate
        pipeline = Pipeline(candidate.stages, 1, candidate.micro_batches, self.mode.order)
        return [in_flight(pipeline, stage) for stage in range(candidate.stages)]

    @property
    def links(self) -> list[Link | None]:
        """Before each stage and behind the last: of the slowest pair of devices that send there."""
        size = self.candidate.mesh.num_devices
        found: list[Link | None] = [None]
        for stage in range(self.candidate.stages - 1):
            pairs = [(stage * size + at, (stage + 1) * size + at) for at in {0, size - 1}]
            routes = [find_route(self.cluster, pair).link for pair in pairs]
            found.append(min(routes, key=lambda link: link.bandwidth_bytes_per_s))
        return [*found, None]

    def held(self, sizes: Sequence[int]) -> list[float]:
        """By stage, bytes of a device, as far as values alone say."""
        ends, flight = [0, *accumulate(sizes)], self.flight
        return [
            float(held_bytes(self.profiles[at], in_flight=flight[at], recompute=self.again)[ends[at], ends[at + 1]])
            for at in range(self.candidate.stages)
        ]

    def step_s(self, sizes: Sequence[int]) -> float:
        """Seconds of a step: each stage waits for those before it once, and then runs all its micro-batches.

        One forward, one backward: a stage has so many micro-batches on the way to those behind it and back as it holds.
        """
        ends, links, flight = [0, *accumulate(sizes)], self.links, self.flight
        slowest = behind = 0.0
        parts = []
        for stage in range(self.candidate.stages):
            own = self.profiles[stage]
            start, stop, link = ends[stage], ends[stage + 1], links[stage + 1]
            each = float((own.forward_s * (1 + self.again) + own.backward_s)[start:stop].sum())
            sent = link.latency_s + own.sent_bytes[stop - 1] / link.bandwidth_bytes_per_s if link else 0.0
            parts.append((each, sent, float(once_seconds(own)[start, stop])))
        before = sum(each + 2 * sent for each, sent, _ in parts)
        for held, (each, sent, once) in zip(reversed(flight), reversed(parts), strict=True):
            behind += each + 2 * sent
            before -= each + 2 * sent
            turn = max(each, sent, behind / held if self.mode.order == "1f1b" else 0.0)
            slowest = max(slowest, before + self.candidate.micro_batches * turn + once)
        return slowest

    def with_seconds(self, forward_s: Numbers, backward_s: Numbers) -> Whole:
        """The same with other seconds on the first stage's devices, and in proportion on the others."""
        first = self.profiles[0]

        def timed(own: Profile) -> Profile:
            forward = forward_s * _ratio(own.forward_s, first.forward_s)
            return replace(own, forward_s=forward, backward_s=backward_s * _ratio(own.backward_s, first.backward_s))

        return replace(self, profiles=self.profiles.map(timed))


def _ratio(one: Numbers, other: Numbers) -> Numbers:
    found: Numbers = np.divide(one, other, out=np.ones_like(one), where=other > 0)
    return found


def stages_of(found: Pieces, count: int, sizes: Sequence[int], *, layered: bool) -> Stages:
    """The pipeline over operators of the rewritten graph, given the pieces of each stage."""
    chunk_of_piece = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    layers = [0] * count
    for piece, stage in enumerate(chunk_of_piece):
        layers[stage] += found.layers[piece]
    chunk_of = {node: chunk_of_piece[piece] for node, piece in found.of.items()} if count > 1 else {}
    inside = [node for node, piece in found.of.items() if found.layers[piece]] if layered or count > 1 else []
    layer_of = {node: found.of[node] for node in inside}
    return Stages(count, 1, chunk_of, tuple(layers) if count > 1 else (), layer_of)
