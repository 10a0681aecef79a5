"""Whether a package is what its plan says, and its plan computes what its source does. Entry point: ``verify``."""

from pdv.verification.package import verify

__all__ = ["verify"]
