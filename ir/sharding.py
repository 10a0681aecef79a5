"""Where a tensor lives: one of four states per mesh axis, and the local shape that follows.

The state also says what the gradient is, which is what makes the backward pass right without a joint graph
(docs/architecture.md, States):
Shard <-> Shard, Invariant <-> Invariant, Replicate <-> Partial.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ir.mesh import Mesh
from ir.types import TensorType


class _OneOfAKind(type):
    """Classes whose equal instances are one object: searches look millions of them up, and so compare addresses."""

    @cache  # noqa: B019  # of a handful of states, as long as the program runs
    def __call__(cls, *args: int) -> Any:
        """The instance of these arguments."""
        return super().__call__(*args)


@dataclass(frozen=True, slots=True, eq=False)
class Shard(metaclass=_OneOfAKind):
    """Each device holds its block of dim ``dim``; the gradient is cut the same way."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, slots=True, eq=False)
class Invariant(metaclass=_OneOfAKind):
    """Each device holds the whole tensor, computed redundantly; so is the gradient."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(metaclass=_OneOfAKind):
    """Each device holds a copy that it uses differently; the gradient is Partial."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, eq=False)
class Partial(metaclass=_OneOfAKind):
    """Each device holds a term of a sum; the gradient of every term is the same (Replicate)."""

    def __str__(self) -> str:
        return "P"


State = Shard | Invariant | Replicate | Partial
Sharding = tuple[State, ...]
"""One state per mesh axis, in mesh order."""


_DUALS: Mapping[type[State], State] = {Replicate: Partial(), Partial: Replicate()}


def with_states(sharding: Sharding, positions: Sequence[int], state: State) -> Sharding:
    """The sharding with one state on the axes at some positions."""
    return tuple(state if at in positions else other for at, other in enumerate(sharding))


def inner_states(sharding: Sharding, positions: Sequence[int]) -> Sharding:
    """States on the axes that are faster than the first at ``positions``, and not among them."""
    return tuple(state for at, state in enumerate(sharding) if at > positions[0] and at not in positions)


def gradient_state(state: State) -> State:
    """The state of the gradient of a value in this state."""
    return _DUALS.get(type(state), state)


def gradient_kind(kind: type[State]) -> type[State]:
    """The kind of state that the gradient is in."""
    return type(_DUALS[kind]) if kind in _DUALS else kind


def parse_state(text: str) -> State:
    """``parse_state(str(s)) == s``.

    Raises:
        ValueError: if ``text`` names no state.
    """
    if text.startswith("S") and text[1:].isdigit():
        return Shard(int(text[1:]))
    states: dict[str, State] = {"I": Invariant(), "R": Replicate(), "P": Partial()}
    if text not in states:
        raise ValueError(f"no state is written {text!r}; states are S<dim>, I, R, P")
    return states[text]


def format_sharding(sharding: Iterable[State]) -> str:
    """``"S0,I"``: the states in mesh order."""
    return ",".join(str(state) for state in sharding)


def parse_sharding(text: str) -> Sharding:
    """``parse_sharding(format_sharding(s)) == s``."""
    return tuple(parse_state(part) for part in text.split(",")) if text else ()


def invariant(mesh: Mesh) -> Sharding:
    """Invariant on every axis: where every graph input starts."""
    return (Invariant(),) * len(mesh.axes)


def shard_degrees(sharding: Sharding, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Into how many blocks each of ``rank`` dims is cut."""
    degrees = [1] * rank
    for state, axis in zip(sharding, mesh.axes, strict=True):
        if isinstance(state, Shard):
            degrees[state.dim] *= axis.size
    return tuple(degrees)


def fits(tensor: TensorType, sharding: Sharding, mesh: Mesh) -> bool:
    """True if every cut is even and names an existing dim."""
    return _piece(tensor, sharding, mesh) is not None


def local_shape(tensor: TensorType, sharding: Sharding, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one device's piece; the cut must fit (see ``fits``)."""
    piece = _piece(tensor, sharding, mesh)
    assert piece is not None, f"{tensor} does not divide as {format_sharding(sharding)} over {mesh}"
    return tuple(piece)


def _piece(tensor: TensorType, sharding: Sharding, mesh: Mesh) -> list[int] | None:
    """The shape of one device's piece; None where a cut is not even, or names no dim."""
    left = list(tensor.shape)
    for state, axis in zip(sharding, mesh.axes, strict=True):
        if isinstance(state, Shard):
            if state.dim >= len(left) or left[state.dim] % axis.size:
                return None
            left[state.dim] //= axis.size
    return left


def local_bytes(tensor: TensorType, sharding: Sharding, mesh: Mesh) -> int:
    """Bytes of one device's piece."""
    size = tensor.dtype.itemsize
    for extent in local_shape(tensor, sharding, mesh):
        size *= extent
    return size
