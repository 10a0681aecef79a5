"""The error classes, their slugs and the three-part message.

An error tells what is wrong (with the actual values), what is allowed, and what to do. `PdvError` is for mistakes of
the user; a broken invariant of our own is an `assert`. The command line turns a `PdvError` into one line on stderr and
its `exit_code`; docs/errors.md has a failing example and the mend for each slug.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any, ClassVar


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?` for the nearest of `known`, or nothing when none is near."""
    near = difflib.get_close_matches(wrong, sorted(known), n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else ""


class PdvError(Exception):
    """A mistake of the user; `str(error)` is `slug: what. allowed. mend.`"""

    slug: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 70

    def __init__(self, what: str, allowed: str = "", mend: str = "") -> None:
        super().__init__(what, allowed, mend)
        self.what = what
        self.allowed = allowed
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.slug}: " + " ".join(_sentence(part) for part in (self.what, self.allowed, self.mend) if part)


class UsageError(PdvError):
    """The command line or the arguments of a call make no sense together."""

    slug = "usage"
    exit_code = 2


class PinsError(PdvError):
    """Pins that cannot be read, name nothing, or contradict each other."""

    slug = "bad-pins"
    exit_code = 2


class ModelError(PdvError):
    """The model cannot be read, or is not a valid program."""

    slug = "bad-model"
    exit_code = 3


class ShapeError(ModelError):
    """Operand shapes that an operator's loops do not admit."""

    slug = "bad-shape"


class UnsupportedOperatorsError(PdvError):
    """The model is valid, but uses operators that have no declaration; `operators` lists every one of them."""

    slug = "unsupported-operators"
    exit_code = 4

    def __init__(
        self, operators: tuple[str, ...], allowed: str = "", mend: str = "", inputs: tuple[str, ...] = ()
    ) -> None:
        """operators: one `op at where` each, in model order; inputs: those whose values would have to be known."""
        super().__init__(
            f"unsupported operators ({len(operators)}): {', '.join(operators)}",
            allowed,
            mend or "Rewrite these parts of the model, or declare the operators (CONTRIBUTING.md, Adding an operator)",
        )
        self.args = (operators, allowed, mend, inputs)  # what pickle calls the constructor with
        self.inputs = inputs
        self.operators = operators


class ClusterError(PdvError):
    """The cluster description cannot be read, or describes no possible cluster."""

    slug = "bad-cluster"
    exit_code = 5


class DeviceError(PdvError):
    """A device record that cannot be read, says what no record may, or does not exist."""

    slug = "bad-device"
    exit_code = 5


class NoPlanFitsError(PdvError):
    """No plan meets the limits, usually of memory, or a search that cannot decide it met none.

    `needed_bytes` is what the smallest one takes per device. `bound_s` is what a step of any plan takes at least: where
    it is infinite, there is none. `ways` are changes that were tried, by what they are called: what they need per
    device, and whether it fits. `cut` says that a search was stopped by its budget, and more time may find a plan.
    """

    slug = "no-plan-fits"
    exit_code = 6

    def __init__(
        self,
        what: str,
        allowed: str = "",
        mend: str = "",
        *,
        needed_bytes: float = math.inf,
        bound_s: float = math.inf,
        ways: tuple[dict[str, Any], ...] = (),  # Any: JSON
        cut: bool = False,
    ) -> None:
        super().__init__(what, allowed, mend)
        self.needed_bytes = needed_bytes
        self.bound_s = bound_s
        self.ways = ways
        self.cut = cut

    def bounded(self, bound_s: float, *, cut: bool) -> NoPlanFitsError:
        """The same refusal where more was searched, with what holds for all of it."""
        return NoPlanFitsError(
            self.what, self.allowed, self.mend, needed_bytes=self.needed_bytes, bound_s=bound_s, ways=self.ways, cut=cut
        )  # fmt: skip

    @property
    def facts(self) -> dict[str, Any]:
        """Numbers of the message, JSON-ready."""
        known = {} if math.isinf(self.needed_bytes) else {"needed_bytes": self.needed_bytes}
        return {**known, **({"ways": list(self.ways)} if self.ways else {})}


class VerificationError(PdvError):
    """A plan does not compute what its source does; `check` is the one that failed: signature, values or gradients."""

    slug = "verification-failed"
    exit_code = 7

    def __init__(self, what: str, allowed: str = "", mend: str = "", *, check: str = "signature") -> None:
        super().__init__(what, allowed, mend)
        self.check = check


class DataError(PdvError):
    """Measurements that cannot be read, say what cannot be, or name a device that nobody described."""

    slug = "bad-data"
    exit_code = 8


class WeightsError(PdvError):
    """A file of the cost model's weights or a checkpoint that cannot be read, or that is of another version."""

    slug = "bad-weights"
    exit_code = 8


class WriteError(PdvError):
    """A file cannot be written: a full disk, or a folder that may not be written to. What was there is still there."""

    slug = "cannot-write"
    exit_code = 9


class InternalError(PdvError):
    """A fault of our own, in place of whatever exception it was (`__cause__`); `report` is the folder to send."""

    slug = "internal-error"
    exit_code = 70

    def __init__(self, what: str, allowed: str = "", mend: str = "", *, report: str = "") -> None:
        super().__init__(what, allowed, mend)
        self.report = report


class ShardingError(PdvError):
    """A sharding that an operator, a shape or a mesh does not allow."""

    slug = "bad-sharding"
    exit_code = 2


def _sentence(part: str) -> str:
    """The part, ended by a full stop unless it ends a sentence already."""
    part = part.strip()
    return part if part.endswith((".", "!", "?")) else part + "."


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line: its first, or else its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
