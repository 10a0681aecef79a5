"""ONNX files with something wrong: bytes, fields of messages, and models made to hurt. Entry point: ``onnx_cases``."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import onnx

from benchmarks.fuzz_runs.case import Case, Link, Pipe, flipped
from benchmarks.fuzz_runs.onnx_hostile import HOSTILE
from benchmarks.fuzz_runs.onnx_models import MODELS, OPTIONS, external_data

TWO = b"nodes:\n  - devices: 2\n    device: cpu-core\n    link: loopback-gloo\n"
TEXTS = (
    "",
    "x",
    "w",
    "y",
    "h",
    "a b",
    "class",
    "self",
    "torch",
    "x'\"\\\n",
    "1st",
    "\x00",
    "é",
    "none",
    "../../x",
    "y\"); import os; os.mkdir('pwned')  #",
    "n" * 300,
    "l" * 70_000,
    "own",
    "ai.onnx",
    "Relu",
    "Add",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    9,
    16,
    24,
    100,
    9999,
    -(1 << 31),
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan)


def plan_command(*options: str, model: str = "m.onnx") -> list[str]:
    """Plan it for two processes."""
    mode = [] if "--mode" in options else ["--budget", "2s"]
    return ["optimize", f"../in/{model}", "-c", "../in/c.yaml", "-o", "out_pdv", "--no-cache", *mode, *options]


def onnx_cases(rng: random.Random) -> Case:
    """One of all that there are."""
    name = rng.choice(list(MODELS))
    proto = MODELS[name]()
    options = [*OPTIONS.get(name, ()), *(("--mode", "infer") if rng.random() < 0.3 else ())]
    files: dict[str, bytes | Link | Pipe] = {"c.yaml": TWO}
    if name == "external":
        files["data/w.bin"] = external_data()
    if rng.random() < 0.25:
        what, data = flipped(proto.SerializeToString(), rng)
        kind = "onnx bytes"
    else:
        said = [mutate(proto, rng) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
        what, data, kind = "; ".join(said), _bytes(proto, rng), "onnx fields"
    return Case(kind, f"{name}: {what}", {**files, "m.onnx": data}, plan_command(*options))


def hostile_cases() -> Iterator[Case]:
    """Every model made to hurt, once."""
    for name, build in HOSTILE.items():
        made = build()
        proto, more, options = made if isinstance(made, tuple) else (made, {}, ())
        data = proto if isinstance(proto, bytes) else proto.SerializeToString()
        yield Case("onnx hostile", name, {"c.yaml": TWO, "m.onnx": data, **more}, plan_command(*options))


def messages(message: Any) -> Iterator[Any]:  # Any: a protobuf message
    """It, and all within it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from messages(inner)


def mutate(proto: onnx.ModelProto, rng: random.Random) -> str:
    """Change one field of one message in place; what."""
    found = [message for message in messages(proto) if message.ListFields()]
    message = rng.choice(found)
    field, value = rng.choice(message.ListFields())
    name = f"{type(message).__name__}.{field.name}"
    match rng.randrange(8):
        case 0:
            message.ClearField(field.name)
            return f"{name} left out"
        case 1 if field.is_repeated:
            value.extend([value[rng.randrange(len(value))]] * rng.choice([1, 1, 3]))
            return f"{name} twice"
        case 2 if field.is_repeated and len(value) > 1:
            kept = list(value)
            rng.shuffle(kept)
            del value[:]
            value.extend(kept)
            return f"{name} in another order"
        case 3 if field.is_repeated:
            del value[rng.randrange(len(value))]
            return f"{name} lacks one"
        case 4 if field.message_type is not None:
            other = rng.choice([each for each in found if type(each).__name__ == field.message_type.name] or [None])
            if other is not None:
                copy = type(other)()
                copy.CopyFrom(other)
                (value.add() if field.is_repeated else value).CopyFrom(copy)
                return f"{name} from elsewhere"
        case 5:
            unset = [each for each in message.DESCRIPTOR.fields if not each.is_repeated and each.message_type is None]
            if unset:
                field = rng.choice(unset)
                setattr(message, field.name, _scalar(field, rng))
                return f"{type(message).__name__}.{field.name} is {getattr(message, field.name)!r}"[:120]
    if field.message_type is not None:
        return mutate(proto, rng)
    said = _scalar(field, rng)
    if field.is_repeated:
        value[rng.randrange(len(value))] = said
    else:
        setattr(message, field.name, said)
    return f"{name} is {said!r}"[:120]


def _scalar(field: Any, rng: random.Random) -> Any:  # Any: a descriptor; what its type holds
    kinds = field
    if field.cpp_type == kinds.CPPTYPE_STRING:
        text = rng.choice(TEXTS)
        return text.encode() if field.type == kinds.TYPE_BYTES else text
    if field.cpp_type in (kinds.CPPTYPE_FLOAT, kinds.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.cpp_type == kinds.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    most = 1 << (31 if field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_UINT32) else 63)
    number = rng.choice(NUMBERS)
    unsigned = field.cpp_type in (kinds.CPPTYPE_UINT32, kinds.CPPTYPE_UINT64)
    return number if (0 if unsigned else -most) <= number < most else 1


def _bytes(proto: onnx.ModelProto, rng: random.Random) -> bytes:
    """As a file; now and then with a name in no encoding."""
    data = proto.SerializeToString()
    if rng.random() < 0.05:
        for name in rng.sample([b"up", b"act", b"Relu", b"MatMul", b"w1", b"table", b"own"], 7):
            if name in data:
                return data.replace(name, b"\xff" * len(name))
    return data
