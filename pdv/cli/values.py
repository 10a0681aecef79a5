"""Option values: text with units, axis sizes, names of packages. Each error says what to write instead."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import typer

from ir.errors import UsageError
from pdv import config

Named = TypeVar("Named", bound=str)
DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# options that decide what a plan is, and what each is where it is not given
RECORDED: Mapping[str, object] = {
    "--arch": None,
    "--batch": None,
    "--dim": None,
    "--freeze": None,
    "--mode": config.MODE,
    "--dtype": None,
    "--precision": config.PRECISION,
    "--products": config.PRODUCTS,
    "--offload": config.OFFLOAD,
    "--allow": None,
    "--compile": False,
    "--memory-limit": None,
    "--mesh": None,
    "--pins": None,
    "--search": config.SEARCH,
    "--budget": f"{config.BUDGET_S:g}s",
    "--pipelines": config.PIPELINES,
    "--stages": None,
    "--micro-batches": None,
    "--schedule": None,
    "--virtual-stages": None,
    "--recompute": None,
    "--slices": None,
    "--seed": 0,
    "--rules": None,
    "--cost": config.COST,
}
_NUMBER = r"-?[0-9]{1,9}(\.[0-9]{1,9})?"
FORMATS = ("fp8", "fp8-rowwise", "mxfp8", "nvfp4")  # of products, which are simulated (`pdv.problem.formats`)
NOT_PACKAGES = sys.stdlib_module_names | {"torch", "safetensors", "numpy", "pdv", "ir", "learned_cost"}


def choice(option: str, text: str, allowed: Sequence[Named]) -> Named:
    """The one that is called so.

    Raises:
        UsageError: if none is.
    """
    known = {one: one for one in allowed}
    if text not in known:
        raise UsageError(f"{option}: {text!r} is not known", f"Allowed: {', '.join(known)}")
    return known[text]


def package_folder(target: Path) -> Path:
    """A package that is named by its folder or by its plan.json."""
    return target.parent if target.is_file() and target.suffix == ".json" else target


def memory_bytes(text: str | None) -> int | None:
    """`"70 GiB"` in bytes."""
    if text is None:
        return None
    from dataclasses import replace

    from pdv.cluster.units import MEMORY, ValueProblem

    try:
        return int(replace(MEMORY, low=2.0**20).parse(text))  # a limit may be far below any device
    except ValueProblem as problem:
        raise UsageError(f"--memory-limit: {problem.what}", problem.allowed, problem.mend) from None


def check_limit(limit: int | None, memory: float) -> None:
    """A limit above what the smallest device has would plan for memory that is not there."""
    if limit is not None and limit > memory:
        from pdv.cluster.units import MEMORY

        what = f"--memory-limit: {MEMORY.format(limit)} is more than the smallest device has"
        raise UsageError(what, f"At most {MEMORY.format(memory)}", "Change the device's memory in the cluster file")


def dtype(text: str | None) -> str | None:
    """The full name of a dtype: `bf16` is bfloat16."""
    if text is None or text in DTYPES:
        return DTYPES[text] if text else None
    if text in FORMATS:
        raise UsageError(
            f"--dtype: {text} is a format of products, and a program computes in another type",
            "Programs are emitted with --products fp8 or fp8-rowwise, all else of them in bfloat16",
            f"Ask what it would bring: `pdv simulate --manual products={text}`",
        )
    raise UsageError(f"--dtype: {text!r} is not known", f"Allowed: {', '.join(sorted(DTYPES))}")


def seconds(text: str, option: str) -> float:
    """`"500ms"` in seconds; a bare number is one of seconds."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h)?\s*", text, re.ASCII)
    value = float(match[1]) * SECONDS[match[2] or "s"] if match else 0.0
    if value <= 0.0:
        raise UsageError(f"{option}: {text!r} is no time", "Allowed units: ms, s, m, h", f"Write {option} 5s")
    return value


def seconds_text(value: float) -> str:
    """Seconds as `seconds` reads them."""
    return f"{value:g}s"


def strategy_names(incomplete: str) -> list[str]:
    """Strategies that begin so, for the shell's completion."""
    from pdv.search.strategies import STRATEGIES

    return [name for name in STRATEGIES if name.startswith(incomplete)]


def cost_name(text: str) -> str:
    """A cost model as a plan's command names it: of a file its name, without folders."""
    return text if text in config.COSTS else Path(text).name


def axis_sizes(text: str | None) -> dict[str, int] | None:
    """`"x=2,y=4"` as axis sizes, slow to fast."""
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z][a-z0-9_]{0,15})\s*=\s*([1-9][0-9]{0,5})\s*", part, re.ASCII)
        if match is None or match[1] in sizes or keyword.iskeyword(match[1]):
            raise UsageError(
                f"--mesh: {part!r} is no axis", "Allowed: name=size, each name once", "Write --mesh x=2,y=4"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def open_dims(texts: list[str] | None) -> dict[str, int | list[float]]:
    """`["sequence=128"]` as sizes, `["axes=0,1"]` as values, by name; a name may hold anything: the last = counts."""
    sizes: dict[str, int | list[float]] = {}
    for text in texts or ():
        name, _, value = text.rpartition("=")
        if name and name not in sizes and re.fullmatch(r"[1-9][0-9]{0,8}", value, re.ASCII):
            sizes[name] = int(value)
        elif name and name not in sizes and re.fullmatch(rf"{_NUMBER}(,({_NUMBER})?)*", value, re.ASCII):
            sizes[name] = [float(part) if "." in part else int(part) for part in value.split(",") if part]
        else:
            raise UsageError(
                f"--dim: {text!r} is no size",
                "Allowed: name=size, each name once; of inputs that are shapes or axes, name=1,2",
                "Write --dim sequence=128",
            )
    return sizes


def package_name(model: Path) -> str:
    """A valid package name for a model's file: `GPT-2 (small).onnx` gives `GPT_2_small_pdv`."""
    stem = re.sub(r"[^0-9A-Za-z]+", "_", model.name.rsplit(".", 1)[0]).strip("_")
    return f"model_{stem}_pdv" if not stem or stem[0].isdigit() else f"{stem}_pdv"


def is_given(context: typer.Context, option: str) -> bool:
    """Whether an option stands on the command line, be it with its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def check_no_file(folder: Path) -> None:
    """That a folder is, or can be made, at this place, before the work starts.

    Raises:
        UsageError: if a file is there.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"-o: {str(folder)!r} is a file", mend="Choose another name")


def check_folder_of(path: Path, option: str = "-o") -> None:
    """That something can be written at ``path``, before the work starts.

    Raises:
        UsageError: if it is to lie in what is no folder, or not there.
    """
    folder = path.absolute().parent
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not there.is_dir():
        raise UsageError(f"{option}: {str(there)!r} is a file, not a folder", mend="Choose another place")
    if there != folder:
        raise UsageError(f"{option}: the folder {str(path.parent)!r} does not exist", mend="Make it first")


def check_file(path: Path, option: str = "-o") -> None:
    """That a file can be written at ``path``, before the work starts.

    Raises:
        UsageError: if a folder is there, or what it is to lie in is none.
    """
    if path.is_dir():
        raise UsageError(f"{option}: {str(path)!r} is a folder", mend="Name a file in it")
    check_folder_of(path, option)


def output_directory(output: Path | None, model: Path, *, overwrite: bool) -> Path:
    """Where the package goes, checked before the work starts: importable by name, and not there already."""
    from pdv.plan.source import check_outside_packages

    path = output or Path(package_name(model))
    name = path.resolve().name
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name in NOT_PACKAGES:
        raise UsageError(
            f"-o: a program cannot import a package called {name!r}",
            "Allowed: letters, digits and _, and no name that Python or torch uses",
            f"Try {package_name(Path(name))!r}",
        )
    check_folder_of(path)
    check_outside_packages(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"-o: {str(path)!r} is a file", mend="Choose another name")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise UsageError(f"-o: {str(path)!r} exists and is not empty", mend="Choose another, or add --overwrite")
    return path


def command_line(model: Path | None, cluster: Path, options: Mapping[str, object]) -> str:
    """What made a plan, without folders and output, so that the same plan is the same bytes wherever it is made.

    Without a ``model``, options name it. Of ``options``, defaults are left out, and a list is one given several times.
    """
    chosen: list[str] = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [] if value == RECORDED[name] else [value]:
            chosen += [name] if one is True else [name, str(one)]
    file = [] if model is None else [model.name]
    return shlex.join(["pdv", "optimize", *file, "--cluster", cluster.name, *chosen])
