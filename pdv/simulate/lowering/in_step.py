"""A cost model's kernels as a simulated step runs them: what no step takes less than. Entry point: ``InStep``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ir.cost_model import NOTHING, Answers, CostModel, Estimate, Group, NodeEstimate, Query, backward_work
from ir.types import TensorType
from pdv.cluster import Device
from pdv.simulate.calibration import CALIBRATION
from pdv.simulate.engine.task import PICO
from pdv.simulate.lowering.price import InStepDevice, Price


@dataclass(frozen=True)
class InStep:
    """What ``compute`` says of kernels on ``device``, without launches that a host issues ahead (``CostModel``)."""

    compute: CostModel
    device: Device

    @property
    def identity(self) -> str:
        """The model's, and how it is read."""
        return f"in a step on {self.device}: {self.compute.identity}"

    @property
    def correlation(self) -> float:
        """The model's."""
        return self.compute.correlation

    @cached_property
    def _device(self) -> InStepDevice:
        return InStepDevice(self.device, CALIBRATION)

    def nodes(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        """As the simulator prices them."""
        return self._answers.nodes(queries)

    def fused(self, groups: Sequence[Group]) -> list[float]:
        """The model's."""
        return self.compute.fused(groups)

    @cached_property
    def _answers(self) -> Answers:
        return Answers(self._ask)

    def _ask(self, queries: Sequence[Query]) -> list[NodeEstimate]:
        return [self._node(*pair) for pair in zip(queries, self.compute.nodes(queries), strict=True)]

    def _node(self, query: Query, found: NodeEstimate) -> NodeEstimate:
        backward = 0
        if query.wanted is not None:
            backward = backward_work(query.op, query.loops, query.operands, query.result, query.wanted).kernels
        price = self._device.of_query(query, found, (int(query.op.kernel), backward))
        return _seconds(found, price)

    def optimizer(self, num_bytes: float, moment: int = 4) -> Estimate:
        """The model's."""
        return self.compute.optimizer(num_bytes, moment)

    def outside(self, outputs: Sequence[TensorType]) -> Estimate:  # noqa: ARG002  # the protocol's
        """Not a part of the graph."""
        return NOTHING

    def on(self, devices: Collection[Device]) -> InStep:  # noqa: ARG002  # the protocol's
        """It is of one device."""
        return self

    @property
    def note(self) -> str:
        """The model's."""
        return self.compute.note

    def provenance(self) -> Mapping[str, Any]:  # Any: JSON
        """The model's."""
        return self.compute.provenance()


def _seconds(found: NodeEstimate, price: Price) -> NodeEstimate:
    return NodeEstimate(
        replace(found.forward, mean_s=price.forward / PICO), replace(found.backward, mean_s=price.backward / PICO)
    )
