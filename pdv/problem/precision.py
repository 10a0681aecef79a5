"""In which types training keeps parameters, gradients and moments: the one place that says it, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ir.types import DType

MOMENTS = 2  # of AdamW (Loshchilov and Hutter, ICLR'19)


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes that training keeps for each element of a parameter of ``weight`` bytes (Micikevicius et al., ICLR'18).

    Attributes:
        gradient: bytes of an accumulated gradient; None: as the weight.
        master: bytes of the optimizer's own copy of the weight (0: it updates the weight itself).
        moment: bytes of each of AdamW's two moments; None: as the weight.
    """

    gradient: int | None = None
    master: int = 0
    moment: int | None = None

    def gradient_bytes(self, weight: int) -> int:
        """Of an element's accumulated gradient."""
        return weight if self.gradient is None else self.gradient

    def optimizer_bytes(self, weight: int) -> int:
        """Of what the optimizer keeps of an element: moments, and the master."""
        return self.master + MOMENTS * (weight if self.moment is None else self.moment)

    def held_bytes(self, weight: int) -> int:
        """Of all that training keeps of an element."""
        return weight + self.gradient_bytes(weight) + self.optimizer_bytes(weight)

    def updated_share(self, weight: int) -> float:
        """Bytes that AdamW moves, over those of weights in their own type; the rounded weight is written, too."""
        own = 2 * self.optimizer_bytes(weight) + (weight if self.master else 2 * weight)
        return (self.gradient_bytes(weight) + own) / ((2 * MOMENTS + 3) * weight)


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
