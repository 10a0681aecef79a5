"""Packages changed at random places, of plan.json and of all files, are refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz_runs.scalars import alter_all
from ir.errors import VerificationError
from pdv.plan.seal import write_document
from pdv.verification import verify
from pdv.verification.fields import CLAIMED
from tests.pdv.packages import Document, document_of
from tests.pdv.test_verification import saved


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(document: Document, rng: random.Random) -> tuple[str, Document]:
    """The document with one place changed, and which."""
    document = json.loads(json.dumps(document))
    path = rng.choice([path for path in places(document) if path and path[0] != "checksum"])
    place = document
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    options: list[Any] = [None, 0, 1, -1, 1.5, "", "x", [], {}, True, False, 1e300]
    if isinstance(old, int | float):
        options += 3 * [old + 1, old * 2, old * (1 + 1e-6), -old]
    if isinstance(old, str):
        options += 5 * [old + "0", old[1:], old.upper()]
    if isinstance(old, dict | list):
        options += 3 * [{**old, "extra": 1} if isinstance(old, dict) else [*old, *old[:1]], type(old)()]
    place[path[-1]] = rng.choice(options)
    if rng.random() < 0.15:
        del place[path[-1]]
    return ".".join(map(str, path)), document


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{}, {"mode": "infer"}], ids=str)
def test_changes_with_a_checksum_that_fits_are_refused(options: dict[str, Any], seed: int, tmp_path: Path) -> None:
    package, rng = Path(shutil.copytree(saved(**options), tmp_path / "two_pdv")), random.Random(seed)
    whole = document_of(package)
    for _ in range(80):
        place, document = changed(whole, rng)
        if {**document, "checksum": ""} == {**whole, "checksum": ""}:
            continue
        write_document(package, document)
        try:
            verify(package)
        except VerificationError:
            continue
        assert place.startswith(tuple(CLAIMED)), place


def test_no_scalar_is_altered_unnoticed() -> None:
    """One in some dozens; ``python -m benchmarks.fuzz_runs.scalars`` takes all of them."""
    files = {path.name: path.read_bytes() for path in saved().iterdir() if path.is_file()}
    tried, unnoticed = alter_all(files, every=37)
    assert tried > 8
    assert not unnoticed


def flipped(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one bit of one changed, one left out, or one added."""
    place = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            return data[:place] + data[place + 1 :]
        case 1:
            return data[:place] + bytes([rng.randrange(256)]) + data[place:]
        case _:
            return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def survives(package: Path, name: str, data: bytes) -> bool:
    """Whether a package with other bytes in a file verifies; anything but a refusal is an error here."""
    path = package / name
    kept = path.read_bytes()
    path.write_bytes(data)
    try:
        verify(package)
    except VerificationError:
        return False
    finally:
        path.write_bytes(kept)
    return True


def harmless(name: str, one: bytes, other: bytes) -> bool:
    """Whether two files say the same: JSON may have other spaces. The page is none that anything is read from."""
    return name == "report.html" or (name == "plan.json" and json.loads(one) == json.loads(other))


def attack(package: Path, times: int, seed: int) -> None:
    rng = random.Random(seed)
    for path in sorted(package.iterdir()):
        kept = path.read_bytes()
        for _ in range(times):
            data = flipped(kept, rng)
            if survives(package, path.name, data):
                assert harmless(path.name, kept, data), f"{path.name} was changed and verified"


def test_flipped_bytes_are_refused(tmp_path: Path) -> None:
    attack(Path(shutil.copytree(saved(), tmp_path / "two_pdv")), times=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{}, {"mode": "infer"}], ids=str)
def test_many_flipped_bytes_are_refused(options: dict[str, Any], seed: int, tmp_path: Path) -> None:
    attack(Path(shutil.copytree(saved(**options), tmp_path / "two_pdv")), times=50, seed=seed)
