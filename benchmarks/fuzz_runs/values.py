"""Values as JSON and YAML have them, changed at one place. Entry points: ``altered``, ``places``."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

Path = tuple[Any, ...]  # Any: keys and positions
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    1 << 200,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e300,
    -1e300,
    math.inf,
    -math.inf,
    math.nan,
    True,
    False,
)
TEXTS = (
    "",
    " ",
    "x",
    "0",
    "-1",
    "none",
    "null",
    "\x00",
    "é" * 8,
    "\ud800",
    "\n",
    "'\"\\",
    "../outside/secret.bin",
    "%s{0}",
    "x" * 70_000,
    "S0",
    "I",
    "P",
    "dp",
    "1e999 GB/s",
    "-3 us",
    "NaN",
    "\u202e",
)


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where something stands in a value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def at(value: Any, path: Path) -> Any:
    """What stands at a place."""
    for key in path:
        value = value[key]
    return value


def altered(value: Any, rng: random.Random) -> tuple[str, Any]:
    """A copy with one thing changed, left out, added or put elsewhere; and what."""
    value = copy.deepcopy(value)
    known = [path for path in places(value) if path]
    if not known:
        return "another value", odd(value, rng)
    path = rng.choice(known)
    holder, key, name = at(value, path[:-1]), path[-1], ".".join(map(str, path))[:80]
    match rng.randrange(8):
        case 0:
            del holder[key]
            return f"{name} left out", value
        case 1 if isinstance(holder, list):
            holder += [copy.deepcopy(holder[key])] * rng.choice([1, 1, 2, 1000])
            return f"{name} several times", value
        case 1:
            holder[rng.choice([*TEXTS, "count", "name", key + "s"])] = holder[key]
            return f"{name} under another name, too", value
        case 2:
            other = rng.choice(known)
            holder[key] = copy.deepcopy(at(value, other)) if other[: len(path)] != path else None
            return f"{name} is {'.'.join(map(str, other))[:80]}", value
        case 3 if isinstance(holder[key], dict | list):
            holder[key] = type(holder[key])()
            return f"{name} is empty", value
        case 4 if isinstance(holder[key], dict | list):
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"x": holder[key]}
            return f"{name} is wrapped", value
    holder[key] = odd(holder[key], rng)
    return f"{name} is {holder[key]!r}"[:160], value


def odd(value: Any, rng: random.Random) -> Any:
    """Another value: mostly of the same type."""
    if isinstance(value, bool) and rng.random() < 0.5:
        return not value
    if isinstance(value, int | float) and rng.random() < 0.8:
        return rng.choice([*NUMBERS, value + 1, value - 1, -value, value * 2, value * (1 + 1e-6)])
    if isinstance(value, str) and rng.random() < 0.8:
        return rng.choice([*TEXTS, value + "0", value[1:], value.upper(), value * 2])
    return rng.choice([None, [], {}, [[]], *NUMBERS, *TEXTS])


def deep(levels: int) -> Any:
    """Lists in lists."""
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found
