"""pipeDejavu: a single-device model in, a sharded PyTorch program out, proved equal.

    plan = pdv.optimize("gpt2.onnx", cluster="cluster.yaml")
    plan.save("gpt2_pdv")

Importing this package imports no torch; the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ir.errors import (
    ClusterError,
    DataError,
    DeviceError,
    InternalError,
    ModelError,
    NoPlanFitsError,
    PdvError,
    PinsError,
    UnsupportedOperatorsError,
    UsageError,
    VerificationError,
    WeightsError,
    WriteError,
)
from pdv.config import VERSION

if TYPE_CHECKING:
    from pdv.compile import optimize
    from pdv.frontend.torch.opaque import register_operator
    from pdv.plan.package import Plan
    from pdv.report.saved import explain
    from pdv.verification import verify
    from pdv.watch import Standing, Watch

__version__ = VERSION

__all__ = [
    "ClusterError",
    "DataError",
    "DeviceError",
    "InternalError",
    "ModelError",
    "NoPlanFitsError",
    "PdvError",
    "PinsError",
    "Plan",
    "Standing",
    "UnsupportedOperatorsError",
    "UsageError",
    "VerificationError",
    "Watch",
    "WeightsError",
    "WriteError",
    "explain",
    "optimize",
    "register_operator",
    "verify",
]

_LAZY = {
    "Plan": "plan.package",
    "Standing": "watch",
    "Watch": "watch",
    "explain": "report.saved",
    "optimize": "compile",
    "register_operator": "frontend.torch.opaque",
    "verify": "verification",
}


def __getattr__(name: str) -> object:
    """Load the compiler only when one of its names is used."""
    if name in _LAZY:
        return getattr(import_module(f"pdv.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
