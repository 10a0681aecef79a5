"""What a file of jobs may say, and each job as words of `pdv optimize`.

    defaults: {cluster: 8x8-h100.yaml, budget: 30s}
    jobs:
      - {arch: [llama-3-8b, llama-3-70b], batch: 512}
      - {model: gpt2.onnx, cluster: [laptop-4.yaml, 2x8-a100.yaml], dim: {sequence: 512}, name: small}

Options are those of `pdv optimize`, by its own signature. Entry point: ``read_jobs``.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, StrictInt, ValidationError, create_model

from ir.errors import UsageError
from pdv.cli import values
from pdv.cli.optimize import optimize
from pdv.cluster.fields import Spec
from pdv.cluster.source import Place, Source, explain_first, read_yaml_as
from pdv.cluster.units import ValueProblem, shorten

OWN = ("cluster", "model", "arch", "output", "overwrite", "quiet", "log_file", "as_json", "debug")
"""Of the parameters of `pdv optimize` those that a file of jobs says in another way, or that are of the whole run."""


def _text(value: object) -> str:
    """A word of the command line; YAML reads some of them as numbers."""
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        raise ValueProblem(f"{shorten(value)} is not allowed here", "Allowed: a text, or a number", "")
    if str(value).startswith("-"):
        raise ValueProblem(f"{shorten(value)} is not allowed here", "", "Write what comes behind the option")
    return str(value)


def _texts(value: object) -> list[str]:
    """One, or several."""
    if value == []:
        raise ValueProblem("a list without entries", "", "Write `- entry`, or leave the key out")
    return [_text(each) for each in value] if isinstance(value, list) else [_text(value)]


def _sizes(value: object) -> dict[str, str]:
    """Numbers by name."""
    if not isinstance(value, dict) or not value:
        raise ValueProblem(f"{shorten(value)} is not allowed here", "Allowed: numbers by name", "Write {name: 2}")
    return {name: ",".join(_texts(size)) for name, size in value.items()}


def _name(value: object) -> str:
    text = _text(value)
    if not re.fullmatch(r"[\w .:,+-]{1,60}", text):
        raise ValueProblem(f"{shorten(value)} is no name", "Allowed: up to 60 letters, digits and _ .:,+-", "")
    return text


Text = Annotated[str, BeforeValidator(_text)]
Texts = Annotated[list[str], BeforeValidator(_texts)]
Sizes = Annotated[dict[str, str], BeforeValidator(_sizes)]
Name = Annotated[str, BeforeValidator(_name)]


@dataclass(frozen=True)
class Job:
    """One model on one cluster.

    Attributes:
        name: what it is called in tables.
        package: the folder that it writes, below that of all jobs.
        model, cluster: as the file names them.
        options: further options, as the file says them.
        words: the arguments of `pdv optimize`, but for where to write.
    """

    name: str
    package: str
    model: str
    cluster: str
    options: Mapping[str, Any]  # Any: plain data
    words: tuple[str, ...]


def read_jobs(path: Path) -> tuple[Job, ...]:
    """The jobs of a file, every model of an entry on every cluster of it.

    Raises:
        UsageError: naming the file, the line and the mend.
    """
    source = read_yaml_as(path, UsageError, "Write `jobs:` (docs/jobs.md)")
    if not isinstance(source.data, dict):
        raise UsageError(f"{source.where(())}: a file of jobs is a mapping", mend="Start with `jobs:`")
    try:
        said = _file().model_validate(source.data)
    except ValidationError as error:
        raise UsageError(*explain_first(error, source, _known_keys)) from None
    shared = said.defaults.model_dump(exclude_none=True)  # type: ignore[attr-defined]  # a model made here
    jobs, places = [], []
    for number, entry in enumerate(said.jobs):  # type: ignore[attr-defined]
        for job in _pairs(shared, entry.model_dump(exclude_none=True), source, ("jobs", number)):
            jobs.append(job)
            places.append(("jobs", number))
    _check_names(jobs, places, source)
    return tuple(jobs)


def _pairs(shared: Mapping[str, Any], own: Mapping[str, Any], source: Source, place: Place) -> Iterator[Job]:
    """The jobs of an entry.

    Raises:
        UsageError: if it has no model or no cluster, or two kinds of models.
    """
    of_model = {"model", "arch"}
    above = {key: value for key, value in shared.items() if not (key in of_model and of_model & own.keys())}
    said = {**above, **own}
    kinds = sorted(of_model & said.keys())
    if len(kinds) != 1 or "cluster" not in said:
        what = "has both a model and an arch" if len(kinds) > 1 else f"has no {'cluster' if kinds else 'model'}"
        mend = "Write one of `model: FILE.onnx` and `arch: NAME`" if len(kinds) != 1 else "Write `cluster: FILE.yaml`"
        raise UsageError(f"{source.where(place)}: the job {what}", mend=mend)
    models, clusters, name = said[kinds[0]], said["cluster"], said.get("name")
    options = {key: value for key, value in said.items() if key not in {*of_model, "cluster", "name"}}
    for model, cluster in product(models, clusters):
        short = model if kinds == ["arch"] else Path(model).stem
        called = f"{short} on {Path(cluster).stem}"
        called = called if name is None else name if len(models) * len(clusters) == 1 else f"{name}: {called}"
        which = ("--arch", model) if kinds == ["arch"] else (model,)
        words = ("--cluster", cluster, *which, *(word for key in options for word in _words(key, options[key])))
        package = values.package_name(Path(called.replace("/", "_") + ".job"))
        yield Job(called, package, model, cluster, options, words)


def _check_names(jobs: Sequence[Job], places: Sequence[Place], source: Source) -> None:
    """Each job writes a folder of its own.

    Raises:
        UsageError: if two would write the same one, or one has a name that no folder has.
    """
    counts = Counter(job.package.lower() for job in jobs)
    for job, place in zip(jobs, places, strict=True):
        if counts[job.package.lower()] > 1 or len(job.package) > 100:
            why = "is another job's, too" if counts[job.package.lower()] > 1 else "is too long"
            what = f"{source.where(place)}: the folder of {job.name!r}, {job.package[:60]}, {why}"
            raise UsageError(what, mend="Give the entry a `name:` of its own")


def _words(key: str, value: Any) -> list[str]:  # Any: plain data
    """An option as words of the command."""
    option = f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        refusal = f"--no-{key.replace('_', '-')}" if key == "check" else None
        return [option] if value else [refusal] if refusal else []
    if isinstance(value, dict):
        pairs = [f"{name}={size}" for name, size in value.items()]
        value = pairs if key == "dim" else ",".join(pairs)
    each = value if isinstance(value, list) else [value]
    return [word for one in each for word in (option, str(one))]


@cache
def _entry() -> type[BaseModel]:
    """An entry of the file: which models on which clusters, and options of `pdv optimize`."""
    hints = get_type_hints(optimize)
    fields: dict[str, Any] = dict.fromkeys(("model", "arch", "cluster"), (Texts, None)) | {"name": (Name, None)}
    for name in inspect.signature(optimize).parameters:
        if name not in OWN:
            fields[name] = (_kind(name, str(hints[name])), None)
    return create_model("JobEntry", __base__=Spec, **fields)


def _kind(name: str, hint: str) -> Any:  # Any: a type that pydantic reads
    """What an option may be, by the type that the command gives it."""
    if name in {"mesh", "dim"}:
        return Sizes
    if "list" in hint:
        return Texts
    return StrictBool if "bool" in hint else StrictInt if "int" in hint else Text


@cache
def _file() -> type[BaseModel]:
    entry = _entry()
    entries: Any = list[entry]  # type: ignore[valid-type]  # a model made here
    jobs: Any = (Annotated[entries, Field(min_length=1)], ...)
    return create_model("JobsFile", __base__=Spec, defaults=(entry, entry()), jobs=jobs)


def _known_keys(place: Place) -> list[str]:
    """The keys that the mapping at ``place`` may have."""
    return list((_entry() if place else _file()).model_fields)
