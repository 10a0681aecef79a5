"""What an engine is: a file in its own words, and what those words cannot say.

A configuration of `pdv.manual` is the common tongue: a plan is brought near one (`pdv.engines.nearest`), an engine
writes as much of it as it can say, and reads its own file back to one. Entry points: ``Engine``,
``narrow``, ``settle``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ir.errors import UsageError, did_you_mean
from pdv.manual.configuration import Configuration

DTYPES = ("float32", "bfloat16", "float16")
Settings = dict[str, Any]  # Any: by setting of a Configuration, its value


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that a plan does and an engine's configuration does not."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Change:
    """What of a configuration an engine cannot say, what is nearest to it, and why."""

    update: Mapping[str, object]
    why: str


@dataclass(frozen=True)
class Target:
    """What a file says beside a configuration.

    Attributes:
        dtype: of compute, as torch calls it.
        nodes: how many, of ``per_node`` devices each.
        layers: of the model, 0 where it has no repeated ones.
        styles: by pattern of a module's name, how tensor parallelism cuts it (``colwise``, ``rowwise``).
        parameters: by name, how it rests, as docs/plan-format.md writes shardings.
    """

    dtype: str
    nodes: int
    per_node: int
    on_gpus: bool
    layers: int = 0
    styles: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """In all."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file is read for: so many devices, and a model of so many layers (0: not known)."""

    devices: int
    layers: int = 0


@dataclass(frozen=True)
class Found:
    """What a file says.

    Attributes:
        settings: of a `Configuration`, those that the file fixes.
        dtype: of compute, None where the file leaves it open.
        unpriced: what takes or saves time and is not simulated, in the file's words.
        unread: what else it says.
        model: the model as ``--arch`` takes it, where the file describes one.
    """

    settings: Settings
    dtype: str | None = None
    unpriced: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    model: str | None = None


class Engine(ABC):
    """One engine; ``file`` is the name of what it is given."""

    name: ClassVar[str]
    file: ClassVar[str]
    start: ClassVar[str]  # how a run is started with the file

    @abstractmethod
    def limits(self, given: Configuration, target: Target) -> Iterator[Change]:
        """What it cannot say of a configuration, one after another; each is asked for again after a change."""

    @abstractmethod
    def write(self, given: Configuration, target: Target) -> str:
        """The file's text, of a configuration without limits."""

    @abstractmethod
    def read(self, text: str, reading: Reading) -> Found:
        """What a file says.

        Raises:
            UsageError: if it is none of this engine's, or says what the engine would refuse.
        """

    def start_line(self, target: Target, file: str) -> str:
        """How a run is started with the file."""
        del target
        return self.start.format(file=file)

    def in_script(self, given: Configuration) -> Mapping[str, str]:
        """By setting, how the training script says it: the file has no place for it (`pdv.engines.beside`)."""
        del given
        return {}


def settle(given: Configuration) -> Configuration:
    """The configuration with settings that mean nothing in it at their defaults, so that equal ones are equal."""
    moot: dict[str, object] = {}
    if given.pp == 1:
        moot |= {"vp": 1, "schedule": "1f1b", "partition": None}
    elif isinstance(given.partition, tuple) and len(set(given.partition)) == 1:
        moot |= {"partition": None}
    if given.tp == 1:
        moot |= {"sp": False}
    if given.data * given.cp == 1:
        moot |= {"zero": 0}
    if given.shard == given.data or given.data * given.cp == 1:
        moot |= {"shard": None}
    return given.model_copy(update=moot)


def narrow(engine: Engine, given: Configuration, target: Target) -> tuple[Configuration, list[Lost]]:
    """The configuration with what the engine cannot say changed for the nearest, devices it frees not yet used."""
    lost: list[Lost] = []
    if target.dtype == "float32" and given.precision != "as-emitted":
        lost.append(Lost(_said(given, "precision", "as-emitted"), "parameters of float32 are their own masters"))
        given = given.model_copy(update={"precision": "as-emitted"})
    given = settle(given)
    while (change := next(engine.limits(given, target), None)) is not None:
        for name in change.update:
            if getattr(given, name) != change.update[name]:
                lost.append(Lost(_said(given, name, change.update[name]), change.why))
                break
        changed = given.model_copy(update=dict(change.update))
        assert changed != given, f"{engine.name} changes nothing: {change}"
        given = settle(changed)
    return given, lost


def _said(given: Configuration, name: str, instead: object) -> str:
    value = getattr(given, name)
    text = "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{name}={text} becomes {name}={instead}" if instead is not None else f"{name}={text}"


# ---- What readers of files share ----


def names(text: str) -> frozenset[str]:
    """Names that stand in a text, one behind the other."""
    return frozenset(text.split())


def take_mapping(value: object, where: str) -> dict[str, Any]:
    """A section of a file.

    Raises:
        UsageError: if it is none.
    """
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{where} is {_kind(value)}, not a section of names and values", "", "See docs/engines.md")
    return value


def take_int(value: object, where: str, least: int = 1) -> int:
    """A whole number; text of one, too.

    Raises:
        UsageError: if it is none, or too small.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**9:
        raise UsageError(f"{where} is {value!r}", f"Allowed: whole numbers from {least}")
    return value


def take_bool(value: object, where: str) -> bool:
    """A truth value; text of one, too.

    Raises:
        UsageError: if it is none.
    """
    known = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in known:
        raise UsageError(f"{where} is {value!r}", "Allowed: true or false")
    return known[str(value).lower()]


def take_word(value: object, where: str, allowed: Mapping[str, Any]) -> Any:  # Any: what the word stands for
    """What one of several words stands for.

    Raises:
        UsageError: if it is none of them.
    """
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{where} is {value!r}", f"Allowed: {', '.join(allowed)}", did_you_mean(str(value), allowed))
    return allowed[value]


def take_dtype(value: object) -> str | None:
    """A type of compute as torch calls it; None where nothing is said.

    Raises:
        UsageError: if it is none of these.
    """
    if value is not None and value not in DTYPES:
        raise UsageError(f"dtype is {value!r}", f"Allowed: {', '.join(DTYPES)}")
    return None if value is None else str(value)


def check_names(given: Mapping[str, Any], known: Mapping[str, Any] | frozenset[str], where: str) -> None:
    """Every name of a section is one that the engine knows.

    Raises:
        UsageError: naming the first that is not.
    """
    for name in given:
        if name not in known:
            mend = did_you_mean(name, known) or "Leave it out, or see docs/engines.md"
            raise UsageError(f"{where} has no setting {name!r}", "", mend)


def _kind(value: object) -> str:
    return {list: "a list", str: "text", type(None): "empty"}.get(type(value), "a number")
