"""Weight files: numbers in NAME.safetensors, all that they mean in NAME.json. Read without running anything in them.

``Weights.description`` says, under these keys: ``features`` (hash of the layout that the numbers were fitted to),
``model`` (sizes, vocabularies, normalisation: what the predictor needs), ``calibration``, ``training`` (rows by source
and device, never rows; date, seed, versions) and ``metrics``. Checkpoints of a training are the same in one file.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ir.errors import WeightsError
from ir.files.reading import FileKind, parse_json, read_bytes
from ir.files.writing import write_together, write_whole

FORMAT_VERSION = 1
SHIPPED = Path(__file__).parent / "weights"
FILE = FileKind(1 << 28, WeightsError)  # shipped weights take less than 10 MB
MAX_HEADER = 1 << 24
PICKLES = (b"\x80", b"PK\x03\x04")  # pickle protocols 2 and later; the zip files of torch.save
Arrays = Mapping[str, NDArray[Any]]  # Any: floats of several widths, and integers


@dataclass(frozen=True)
class Weights:
    """Numbers by name, and what they mean.

    Attributes:
        kind: what they are of: "kernels", "collectives", or "checkpoint".
        name: of the files, for reports.
        digest: sha256 of the numbers, in hex.
    """

    kind: str
    arrays: Arrays
    description: Mapping[str, Any]
    name: str = ""
    digest: str = ""


def stem(path: Path) -> Path:
    """The path without the suffix of either file."""
    return path.with_suffix("") if path.suffix in {".safetensors", ".json"} else path


def save_weights(path: Path, weights: Weights) -> Weights:
    """Write both files; returns the weights with name and digest.

    Raises:
        WriteError: if they cannot be written.
    """
    base = stem(path)
    numbers = _numbers_text(weights.arrays)
    digest = hashlib.sha256(numbers).hexdigest()
    head = {"format_version": FORMAT_VERSION, "kind": weights.kind, "sha256": digest}
    text = json.dumps({**weights.description, **head}, indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_together({_beside(base, ".safetensors"): numbers, _beside(base, ".json"): text.encode()})
    return Weights(weights.kind, weights.arrays, weights.description, base.name, digest)


def load_weights(path: Path, kind: str | None, *, features: str | None = None) -> Weights:
    """The weights in NAME.safetensors and NAME.json; ``path`` is NAME or either file. Any kind will do if it is None.

    Raises:
        WeightsError: if one is missing, damaged, foreign, of another version or kind, or, where ``features`` is given,
            fitted to another layout of features.
    """
    base = stem(path)
    numbers_path, text_path = _beside(base, ".safetensors"), _beside(base, ".json")
    allowed = "Allowed: the name of a weight file, NAME.safetensors with NAME.json beside it"
    for needed in (numbers_path, text_path):
        if not needed.is_file():
            raise WeightsError(
                f"there is no {needed}",
                allowed,
                "`pdv cost train` makes both; without a name, `pdv cost show` shows the shipped ones",
            )
    raw = read_bytes(numbers_path, FILE)
    description = _description(text_path, read_bytes(text_path, FILE))
    _check_head(text_path, description, kind)
    arrays = _arrays(numbers_path, raw)
    digest = hashlib.sha256(raw).hexdigest()
    if description.get("sha256") != digest:
        raise WeightsError(
            f"{numbers_path.name} and {text_path.name} in {base.parent} do not belong together",
            "The two files of one training",
            "Copy both again, or train again",
        )
    if features is not None and description.get("features") != features:
        raise WeightsError(
            f"{numbers_path} was fitted to features {str(description.get('features'))[:12]}",
            f"This version computes features {features[:12]}",
            "Train again with this version, or use the shipped weights",
        )
    return Weights(str(description["kind"]), arrays, description, base.name, digest)


def save_checkpoint(path: Path, arrays: Arrays, description: Mapping[str, Any]) -> None:
    """One file, so that numbers and meaning cannot come apart when the process is killed.

    Raises:
        WriteError: if it cannot be written; the one before is then still there.
    """
    head = {**description, "format_version": FORMAT_VERSION, "kind": "checkpoint"}
    write_whole(path, _numbers_text(arrays, json.dumps(head, sort_keys=True)))


def load_checkpoint(path: Path) -> Weights:
    """What ``save_checkpoint`` wrote.

    Raises:
        WeightsError: if it is missing, damaged, foreign or of another version.
    """
    if not path.is_file():
        raise WeightsError(f"there is no checkpoint {path}", mend="Train without --resume")
    raw = read_bytes(path, FILE)
    arrays = _arrays(path, raw)
    (length,) = struct.unpack("<Q", raw[:8])
    text = json.loads(raw[8 : 8 + length]).get("__metadata__", {}).get("description", "")
    description = _description(path, text.encode())
    _check_head(path, description, "checkpoint")
    return Weights("checkpoint", arrays, description, path.name, hashlib.sha256(raw).hexdigest())


def _beside(base: Path, suffix: str) -> Path:
    return base.with_name(base.name + suffix)


def _numbers_text(arrays: Arrays, description: str | None = None) -> bytes:
    from safetensors.numpy import save

    whole = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    text: bytes = save(whole, metadata=None if description is None else {"description": description})
    return text


def _arrays(path: Path, raw: bytes) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    mend = "Copy it again, or train again"
    try:
        (length,) = struct.unpack("<Q", raw[:8])
        if length > MAX_HEADER:
            raise ValueError(f"a header of {length} bytes")
        arrays: Arrays = load(raw)
    except (SafetensorError, struct.error, ValueError, KeyError, TypeError) as error:
        if raw.startswith(PICKLES):
            what = f"{path} is a pickle, not safetensors; it was not opened"
            raise WeightsError(what, "Allowed: safetensors", mend) from error
        told = " ".join(str(error).split())[:120]
        raise WeightsError(f"{path} is no safetensors file, or a damaged one ({told})", mend=mend) from error
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise WeightsError(f"{path}: {name} holds numbers that are not finite", mend=mend)
    return arrays


def _description(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        data = parse_json(raw)
    except ValueError as error:
        told = " ".join(str(error).split())[:120]
        raise WeightsError(f"{path} describes no weights ({told})", mend="Copy it again, or train again") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path} describes no weights", "Allowed: a JSON object as `pdv cost train` writes it")
    return data


def _check_head(path: Path, description: Mapping[str, Any], kind: str | None) -> None:
    version = description.get("format_version")
    if version != FORMAT_VERSION:
        raise WeightsError(
            f"{path} has format version {version!r}"[:200],
            f"This version reads {FORMAT_VERSION}",
            "Train again, or use the pdv that wrote it",
        )
    found = description.get("kind")
    if not isinstance(found, str) or (kind is not None and found != kind):
        raise WeightsError(f"{path} is of kind {found!r}"[:200], f"Needed here: {kind or 'kernels or collectives'!r}")


def training_facts(weights: Weights, what: str) -> list[str]:
    """Devices (``by_device``), sources or operators that weights have seen, those before a fine-tuning included."""
    training = weights.description.get("training", {})
    return sorted({*training.get(what, {}), *training.get("before", {}).get(what, {})})


def finite(value: float) -> float | None:
    """A number for JSON, which knows no NaN: None where there is nothing to say."""
    return float(value) if math.isfinite(value) else None
