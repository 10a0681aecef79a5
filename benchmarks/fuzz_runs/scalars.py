"""Every scalar of plan.json altered, with a checksum that fits: which alterations `pdv verify` does not notice, besides
those of what it says that it believes (``pdv.verification.fields.CLAIMED``).

python -m benchmarks.fuzz_runs.scalars [--every 1]
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz_runs.packages import make_packages, sealed
from benchmarks.fuzz_runs.run import Runner
from benchmarks.fuzz_runs.values import at, places
from ir.errors import PdvError
from pdv.verification import verify
from pdv.verification.fields import CLAIMED


def main() -> None:
    """Print how many of each package's were refused, and the places of the others."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="one in so many scalars")
    options = parser.parse_args()
    runner = Runner()
    packages = make_packages(runner)
    runner.close()
    for name, files in packages.items():
        tried, unnoticed = alter_all(files, options.every)
        print(f"{name}: {tried} alterations, {tried - sum(unnoticed.values())} refused")
        for place, count in sorted(unnoticed.items()):
            print(f"    {place} ({count})")


def alter_all(files: dict[str, bytes], every: int) -> tuple[int, Counter[str]]:
    """How many alterations were tried, and those that were not refused, by place (numbers of lists left out)."""
    document = json.loads(files["plan.json"])
    tried, unnoticed = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "two_pdv"
        package.mkdir()
        for file, data in files.items():
            (package / file).write_bytes(data)
        scalars = [path for path in places(document) if path and not isinstance(at(document, path), dict | list)]
        verify(package)
        for path in [path for path in scalars if path != ("checksum",)][::every]:
            for value in others(at(document, path)):
                if value == at(document, path):
                    continue
                changed = json.loads(files["plan.json"])
                at(changed, path[:-1])[path[-1]] = value
                (package / "plan.json").write_bytes(sealed(changed))
                tried += 1
                try:
                    verify(package)
                except PdvError:
                    continue
                place = ".".join(map(str, path))
                if not place.startswith(tuple(CLAIMED)):
                    unnoticed[re.sub(r"\.\d+", "[]", place)] += 1
    return tried, unnoticed


def others(value: Any) -> Iterator[Any]:  # Any: scalars of JSON
    """Other values of the same type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2 + 1, value * (1 + 1e-3))
    elif isinstance(value, str):
        yield from (value + "x", value[1:])
    else:
        yield from (1, "x")


if __name__ == "__main__":
    main()
