"""In which types training keeps parameters, gradients and moments, and where: the one place that says it, its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ir.cost_model import CostModel, Estimate
from ir.types import DType
from pdv.cluster.host import Host
from pdv.cost.compute import ROOFLINE_RELATIVE_STD

MOMENTS = 2  # of AdamW (Loshchilov and Hutter, ICLR'19)


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes that training keeps for each element of a parameter of ``weight`` bytes (Micikevicius et al., ICLR'18).

    Attributes:
        gradient: bytes of an accumulated gradient; None: as the weight.
        master: bytes of the optimizer's own copy of the weight (0: it updates the weight itself).
        moment: bytes of each of AdamW's two moments; None: as the weight.
        on_host: what the optimizer updates, and its moments, lie in the host's memory, where it steps; a device keeps
            weights to compute with, and gradients until they are sent there (ZeRO-Offload, Ren et al., ATC'21).
    """

    gradient: int | None = None
    master: int = 0
    moment: int | None = None
    on_host: bool = False

    def gradient_bytes(self, weight: int) -> int:
        """Of an element's accumulated gradient."""
        return weight if self.gradient is None else self.gradient

    @property
    def masters_here(self) -> bool:
        """Whether a device has the optimizer's own copy of its weights."""
        return self.master > 0 and not self.on_host

    def moment_bytes(self, weight: int) -> int:
        """Of an element's moments."""
        return MOMENTS * (weight if self.moment is None else self.moment)

    def optimizer_bytes(self, weight: int) -> int:
        """Of what a device keeps of an element for the optimizer: moments, and the master."""
        return 0 if self.on_host else self.master + self.moment_bytes(weight)

    def host_bytes(self, weight: int) -> int:
        """Of what the host keeps of an element: what is updated, its moments, and its gradient."""
        return (self.master or weight) + self.moment_bytes(weight) + self.gradient_bytes(weight) if self.on_host else 0

    def held_bytes(self, weight: int) -> int:
        """Of all that training keeps of an element on a device."""
        return weight + self.gradient_bytes(weight) + self.optimizer_bytes(weight)

    def updated_bytes(self, weight: int) -> int:
        """Of an element that AdamW reads and writes; the rounded weight is written, too."""
        updated = 2 * self.master + weight if self.master else 2 * weight
        return self.gradient_bytes(weight) + 2 * self.moment_bytes(weight) + updated

    def updated_share(self, weight: int) -> float:
        """Bytes that AdamW moves, over those of weights in their own type."""
        return self.updated_bytes(weight) / ((2 * MOMENTS + 3) * weight)


def step_estimate(
    precision: Precision, compute: CostModel, host: Host | None, num_bytes: float, weight: int
) -> Estimate:
    """AdamW's step for ``num_bytes`` of weights in a type of ``weight`` bytes, on a device or on its host.

    There gradients are sent first, and weights come back behind it: nothing of it runs beside compute.
    """
    if not precision.on_host:
        return compute.optimizer(num_bytes, precision.moment_bytes(weight) // MOMENTS).times(
            precision.updated_share(weight)
        )
    assert host is not None, "asked of problems that have one"
    elements = num_bytes / weight
    sent, stepped = precision.gradient_bytes(weight), precision.updated_bytes(weight)
    seconds = host.step_s(elements * sent, elements * stepped, elements * weight)
    return Estimate(seconds, ROOFLINE_RELATIVE_STD * seconds)


AS_EMITTED = Precision()  # AdamW on the weights themselves, everything in their type
MIXED = Precision(gradient=4, master=4, moment=4)  # Megatron-LM, fp32 accumulation: 18 bytes for each 2-byte weight
MIXED_TWO_GRADIENTS = Precision(gradient=6, master=4, moment=4)  # DeepSpeed's BF16_Optimizer: 2-byte ones and sums
MIXED_HALF_GRADIENTS = Precision(gradient=2, master=4, moment=4)  # ZeRO's 16 bytes (Rajbhandari et al., SC'20, 3.1)
PRECISIONS: Mapping[str, Precision] = {
    "as-emitted": AS_EMITTED,
    "mixed": MIXED,
    "mixed-half-gradients": MIXED_HALF_GRADIENTS,
    "mixed-two-gradients": MIXED_TWO_GRADIENTS,
}
RUN_PRECISIONS = ("as-emitted", "mixed")
"""Those that emitted programs train in."""
MASTER, ROUNDED = DType.F32, DType.BF16
"""What parameters rest in, and what they are rounded to for compute, in a mixed precision that is run."""
