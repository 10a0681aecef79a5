"""Which cost model a name stands for: auto, learned, measured, weights or profiles. Entry: ``choose_cost_model``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ir.errors import UsageError, did_you_mean
from learned_cost.devices.device import DeviceRecord, Dtype, find, load_records
from learned_cost.estimator import Analytic, KernelCosts, Place

if TYPE_CHECKING:
    from learned_cost.data.measured import Measurements
    from learned_cost.kernels.predict import Predictor

AUTO, LEARNED, MEASURED = "auto", "learned", "measured"
SHIPPED = frozenset((AUTO, LEARNED, MEASURED))  # names of what ships, not of files
NOT_HERE = ", none of this cluster's devices: it is not used"
LANES_HZ = 256 * 1.6e9  # float32 FLOP/s of a unit of GPUs of 2017 to 2025: 128 lanes, two operations, 1.6 GHz
DTYPES: dict[str, Dtype] = {
    "float64": "fp64",
    "float32": "fp32",
    "tfloat32": "tf32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8": "fp8",
}


@dataclass(frozen=True, slots=True)
class Described:
    """A device class as a cluster file describes it; the record of its name, if there is one, knows more."""

    name: str
    kind: Literal["gpu", "cpu"]
    memory_bytes: int
    peak_flops: tuple[tuple[str, float], ...]
    memory_bandwidth_bytes_per_s: float
    pace: float = 1.0


def choose_cost_model(choice: str, devices: Sequence[Described], analytic: Analytic) -> KernelCosts:
    """The cost model that ``choice`` names, for these device classes.

    Args:
        choice: "learned" (the shipped weights), "measured" (the shipped profiles, then these), "auto" (of devices that
            have a record, their shipped profiles, then these), a weight file, or a folder of profiles (then the
            shipped weights).
        devices: the cluster's device classes.
        analytic: what is fallen back to.

    Raises:
        UsageError: if it is none of them.
        WeightsError, DataError: if the file or folder is damaged or foreign.
    """
    records = _records(choice)
    places = tuple(_place(device, records, guess=choice != AUTO) for device in devices)
    predictor, measured = _sources(choice, places)
    facts = {
        "name": choice if choice in SHIPPED else Path(choice).name,
        "weights": None if predictor is None else {"name": predictor.weights.name, "hash": predictor.weights.digest},
        "profiles": None if measured is None else {"name": measured.name, "hash": measured.digest},
        "devices": {
            device.name: place.record.name if place.known else "as the cluster file describes it"
            for device, place in zip(devices, places, strict=True)
        },
    }
    identity = repr((facts["weights"], facts["profiles"], places, analytic))
    note = "" if choice in SHIPPED else _foreign(Path(choice).name, places, predictor, measured)
    return KernelCosts(places, analytic, identity, predictor, measured, facts=facts, note=note)


def _foreign(file: str, places: Sequence[Place], predictor: Predictor | None, measured: Measurements | None) -> str:
    """What a user's file knows of other devices alone, none of which is here: it then says nothing of these.

    Weights that were trained say something of any device; what corrects them, and profiles, of those measured alone.
    """
    here = {place.record.name for place in places}
    correction = None if predictor is None else predictor.correction
    if correction is not None and correction.device not in here:
        return f"what corrects {file} was measured on {correction.device}{NOT_HERE}"
    of = set() if measured is None else measured.devices
    return f"{file} was measured on {', '.join(sorted(of))}{NOT_HERE}" if of and not of & here else ""


def is_recorded(name: str) -> bool:
    """Whether a record of this device ships."""
    return find(name, load_records().values()) is not None


def _sources(choice: str, places: Sequence[Place]) -> tuple[Predictor | None, Measurements | None]:
    path = Path(choice)
    is_weights = path.suffix in {".safetensors", ".json"} or Path(f"{choice}.safetensors").is_file()
    if choice not in SHIPPED and not (choice and path.is_dir()) and not is_weights:
        raise UsageError(
            f"--cost: {choice[:80]!r} is no cost model, and no file or folder here",
            "Allowed: auto, analytic, learned, measured, a weight file of `pdv cost train`, a folder of `pdv profile`",
            did_you_mean(choice, (AUTO, "analytic", LEARNED, MEASURED)) or "Check the path",
        )
    from learned_cost.data.measured import SHIPPED as PROFILES
    from learned_cost.data.measured import Measurements
    from learned_cost.kernels.predict import Predictor

    if choice in {AUTO, MEASURED}:
        folders = sorted(folder for folder in PROFILES.glob("*") if folder.is_dir())
        if choice == AUTO:  # profiles of other devices would be read for nothing, and need a package to be read
            here = {place.record.name for place in places}
            folders = [folder for folder in folders if folder.name in here and find_spec("pyarrow")]
        return Predictor.load(None), _shipped(tuple(folders)) if folders or choice == MEASURED else None
    if choice != LEARNED and path.is_dir():
        measured = Measurements.read([path], path.resolve().name)
        return Predictor.load(None), measured
    return Predictor.load(None if choice == LEARNED else path), None


@lru_cache(maxsize=8)
def _shipped(folders: tuple[Path, ...]) -> Measurements:
    """Of profiles that ship, which stay as they are while a process runs."""
    from learned_cost.data.measured import Measurements

    return Measurements.read(folders, "shipped")


def _records(choice: str) -> Mapping[str, DeviceRecord]:
    """Those that ship, and those in ``devices/`` beside a weight file or in a folder of profiles."""
    path = Path(choice)
    folder = (path if path.is_dir() else path.parent) / "devices"
    own = choice not in SHIPPED and folder.is_dir()
    return load_records(folder if own else None)


def _place(device: Described, records: Mapping[str, DeviceRecord], *, guess: bool = True) -> Place:
    record = find(device.name, records.values())
    if record is not None:
        return Place(record, pace=device.pace)
    return Place(_as_record(device), known=False, pace=device.pace, guess=guess)


def _as_record(device: Described) -> DeviceRecord:
    """What the cluster file says, as a record; what it does not say is unknown."""
    units = max(1, round(dict(device.peak_flops)["float32"] / LANES_HZ)) if device.kind == "gpu" else 1
    peaks = {DTYPES[name]: rate for name, rate in device.peak_flops if name in DTYPES}
    return DeviceRecord(
        name=device.name,
        kind=device.kind,
        vendor="unknown",
        arch="unknown",
        sm_count=units,
        peak_flops=peaks,
        memory_bytes=device.memory_bytes,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        source="the cluster file",
    )
