"""What a training step costs the host beside its kernels, where nothing hides it: on CPUs, in eager PyTorch.

On a GPU these run ahead of the device, and the analytic optimizer stands. Measured by ``benchmarks/host_costs.py``
(command and date below): seconds per parameter and per byte of it, by least relative squares over 1 KiB to 16 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Of parameters that are DTensors, as emitted programs keep them.

    Attributes:
        parameter_s: fused AdamW's step and ``zero_grad``, taking the leaf and giving the gradient, a parameter.
        byte_s: the same for each of its bytes, and the first touch of weight and gradient: profiles find both in cache.
        relative_std: of the fit.
    """

    parameter_s: float
    byte_s: float
    relative_std: float

    def seconds(self, num_bytes: float) -> float:
        """A step of one parameter of which a process holds so many bytes."""
        return self.parameter_s + self.byte_s * num_bytes


# python benchmarks/host_costs.py, one process on one core of an AMD EPYC, PyTorch 2.13, other processes held back.
# 2026-11-23, medians of quiet runs: torch's default AdamW on local tensors, and giving gradients, 27 us and 0.70 s a
# GB; taking a leaf 4 us; first touch 0.05 s, adding to an earlier gradient as much. 2026-11-27, on a slower machine,
# in turns: the fused one takes 0.35 of that for a parameter, and 0.35 to 0.38 for a byte.
CPU = HostCosts(parameter_s=13.5e-6, byte_s=0.31e-9, relative_std=0.15)
