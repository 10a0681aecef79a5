"""What pieces take at least, on each kind of stage that a candidate has. Entry point: ``LeastInsides``.

A stage is of a kind: that of its slowest device, as all of its devices have even shares, and its mesh's links.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ir.mesh import Mesh
from pdv.cluster import Device
from pdv.cost.comm import AxisLink
from pdv.pcg.redistribute import Redistribution
from pdv.pipelines.bounding.even import EvenPieces, HeldBlocks, even_pieces
from pdv.pipelines.bounding.floors import Floors
from pdv.pipelines.bounding.least import LeastInside, reached_links
from pdv.pipelines.candidates import Candidate, Space
from pdv.pipelines.estimates import Estimates
from pdv.search.solver.configs import KnownConfigs
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.lowering.price import copying_s

COMING = 0.75  # of what rests while the only micro-batch runs forward: gradients come as it runs backward


@dataclass(frozen=True)
class Kind:
    """What stages are that take alike."""

    device: Device
    axes: tuple[AxisLink, ...]


@dataclass
class LeastInsides:
    """Of a space, whose program is as ``floors`` has it; ``solved``: how many insides there are so far."""

    space: Space
    estimates: Estimates
    floors: Floors
    solved: int = 0
    _insides: dict[tuple[int, int, Mesh, Kind], LeastInside | None] = field(default_factory=dict)
    _known: dict[tuple[object, ...], KnownConfigs] = field(default_factory=dict)
    _moves: dict[tuple[object, ...], Redistribution] = field(default_factory=dict)
    _pieces: dict[tuple[tuple[int, ...], int, Device], EvenPieces] = field(default_factory=dict)
    _held: dict[int, HeldBlocks] = field(default_factory=dict)

    def kinds(self, candidate: Candidate) -> list[Kind]:
        """By stage."""
        slowest = [self.floors.slowest_of(self.space.devices_of(candidate, at)) for at in range(candidate.stages)]
        return [Kind(device, axes) for device, axes in zip(slowest, candidate.axes, strict=True)]

    def evenly(self, candidate: Candidate) -> list[EvenPieces]:
        """By stage: each operator by itself, as fast and as small as can be."""
        return [self._evenly(candidate, kind.device) for kind in self.kinds(candidate)]

    def of(self, candidate: Candidate) -> list[LeastInside] | None:
        """By stage; None if there is no such program."""
        found = [self._inside(candidate, kind) for kind in self.kinds(candidate)]
        return None if None in found else [one for one in found if one is not None]

    def _evenly(self, candidate: Candidate, device: Device) -> EvenPieces:
        count, mesh = candidate.micro_batches, candidate.mesh
        key = mesh.shape, count, device
        if key not in self._pieces:
            seconds = self.floors.of_blocks(count, mesh, device)
            loss_s = self.floors.loss_s(count, mesh, device)
            self._pieces[key] = even_pieces(self._blocks(count), seconds, mesh.num_devices, loss_s=loss_s)
        return self._pieces[key]

    def _blocks(self, micro_batches: int) -> HeldBlocks:
        """Of the program of one micro-batch, which there is."""
        if micro_batches not in self._held:
            source = self.estimates.source(micro_batches)
            assert source is not None, "asked of programs that there are"
            self._held[micro_batches] = HeldBlocks.of(source, self.space.problem, lean=self.space.lean)
        return self._held[micro_batches]

    def _inside(self, candidate: Candidate, kind: Kind) -> LeastInside | None:
        key = candidate.stages, candidate.micro_batches, candidate.mesh, kind
        if key not in self._insides:
            self._insides[key] = self._find(candidate, kind)
        return self._insides[key]

    def _find(self, candidate: Candidate, kind: Kind) -> LeastInside | None:
        count, mesh = candidate.micro_batches, candidate.mesh
        source = self.estimates.source(count)
        if source is None:
            return None
        self.solved += 1
        problem = replace(
            self.space.of_micro_batch(source.graph, count),
            mesh=mesh,
            once=1.0 / count if candidate.stages == 1 else 0.0,
            several=candidate.several,
            adding_s=self.space.adding_s if count > 1 else 0.0,
            resting=resting(candidate),
        )
        loss_s = self.floors.loss_s(count, mesh, kind.device)
        links = mesh, reached_links(kind.axes)
        key = (*links, kind.device, problem.once, problem.several, problem.adding_s, problem.resting)
        if key not in self._known:
            moves = Redistribution(*links, problem.bucket_bytes, copying_s(kind.device, CALIBRATION))
            self._known[key] = KnownConfigs(self._moves.setdefault((*links, kind.device), moves))
        compute, known, held = self.space.in_step(kind.device), self._known[key], self._blocks(count)
        forward, backward, _ = self.floors.of_blocks(count, mesh, kind.device)
        own = (forward + backward)[held.apart :]
        rewrites, slowed, lean = self.floors.rewrites, self._slowed, self.space.lean
        return LeastInside(problem, compute, kind.axes, loss_s, own, source, held.spans, rewrites, slowed, lean, known)

    @property
    def _slowed(self) -> float:
        """Of what collectives take, what they take of compute: of that of the fastest class, where others wait less."""
        one_kind = self.space.cluster.has_gpus and len(self.space.cluster.classes) == 1
        return 1.0 - 1.0 / CALIBRATION.overlap_slowdown if one_kind else 0.0


def resting(candidate: Candidate) -> float:
    """What a byte that rests counts as, where a micro-batch's count as they are."""
    return COMING if candidate.micro_batches == 1 else 1.0 / flight(candidate)


def flight(candidate: Candidate) -> float:
    """Micro-batches in flight that an inside counts what rests as a part of."""
    return float(max(1, min(candidate.stages, candidate.micro_batches - 1)))
