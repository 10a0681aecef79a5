"""The engines there are, by name, and which of them a file is for. Entry points: ``ENGINES``, ``engine_of``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ir.errors import UsageError, did_you_mean
from pdv.engines.engine import Engine
from pdv.engines.formats.accelerate import Accelerate
from pdv.engines.formats.deepspeed import DeepSpeed
from pdv.engines.formats.megatron import Megatron
from pdv.engines.formats.plain import Plain
from pdv.engines.formats.torchtitan import Torchtitan
from pdv.engines.formats.transformers import Transformers

ENGINES: Mapping[str, Engine] = {
    one.name: one for one in (Torchtitan(), Megatron(), DeepSpeed(), Transformers(), Accelerate(), Plain())
}
SIGNS: Mapping[str, tuple[tuple[str, str], ...]] = {  # by ending of the file's name, what stands in which engine's
    ".yaml": (("distributed_type", "accelerate"),),
    ".yml": (("distributed_type", "accelerate"),),
    ".toml": (("", "torchtitan"),),
    ".json": (
        ("configuration_version", "json"),
        ("tp_size", "hf-tp-plan"),
        ("tp_plan", "hf-tp-plan"),
        ("fsdp_size", "hf-tp-plan"),
        ("train_", "deepspeed"),
        ("zero_optimization", "deepspeed"),
    ),
    "": (("--parallelism.", "torchtitan"), ("model-parallel-size", "megatron"), ("model_parallel_size", "megatron"),
         ("--micro-batch-size", "megatron")),
}  # fmt: skip


def named(name: str) -> Engine:
    """An engine by name.

    Raises:
        UsageError: if there is none of that name.
    """
    if name not in ENGINES:
        allowed = f"Allowed: {', '.join(ENGINES)}"
        raise UsageError(f"no engine is called {name!r}", allowed, did_you_mean(name, ENGINES))
    return ENGINES[name]


def engine_of(path: Path, text: str) -> Engine:
    """The engine that a file is for, by the ending of its name and by what stands in it.

    Raises:
        UsageError: if it is none's that is known.
    """
    for sign, name in SIGNS.get(path.suffix.lower(), SIGNS[""]):
        if sign in text:
            return ENGINES[name]
    raise UsageError(
        f"{path.name} is not known to be a configuration of any engine",
        f"Engines: {', '.join(ENGINES)}",
        "Name the engine with --from",
    )
