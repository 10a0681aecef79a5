"""What each case of plans.py is planned, proved and emitted as, in digests: one line a case, to compare with `diff`.

python benchmarks/golden.py [--models NAME …] [--clusters NAME …] [--smoke] [--json OUT] > before
…; python benchmarks/golden.py > after; diff before after
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.models.shapes import program
from benchmarks.plans import CASES, CLUSTERS, Case, load
from benchmarks.record import Record, arguments

if TYPE_CHECKING:
    from pdv.plan.package import Plan

SMOKE = (("2x8-a100", "analytic"),)
PRICED = (*((name, "analytic") for name in CLUSTERS), ("2x8-a100", "learned"))
APART = ("derivation", "operators", "predicted", "search", "proof", "simulated", "run")
"""Fields of plan.json that get a digest of their own."""


def main() -> None:
    """Print one line for each model and cluster; with --json write the record."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[case.model for case in CASES], help="these alone")
    parser.add_argument("--clusters", nargs="+", choices=list(CLUSTERS), help="these alone")
    options = parser.parse_args()
    record = Record()
    cases = [case for case in CASES if case.model in (options.models or [case.model])]
    priced = [pair for pair in PRICED if pair[0] in (options.clusters or pair)]
    for case in (Case("gpt2", 32, 128),) if options.smoke else cases:
        model = program(case.model, case.batch, case.sequence)
        for name, cost in SMOKE if options.smoke else priced:
            found = digests_of_plan(model, name, cost)
            print(f"{case.model} {name} {cost}", *(f"{key}={value}" for key, value in found.items()), flush=True)
            record.rows.append({"model": case.model, "cluster": name, "cost": cost, **found})
    record.claim("cases planned and digested", float(len(record.rows)), "")
    record.write(options.json)


def digests_of_plan(model: Any, cluster: str, cost: str) -> dict[str, str]:  # Any: a program, whose module imports late
    """The plan of a model on a cluster, priced by ``cost``: digests of what is written, or what is refused."""
    import pdv
    from ir.errors import NoPlanFitsError

    try:
        plan = pdv.optimize(model, cluster=load(cluster), cost=cost)
    except NoPlanFitsError as error:
        return {"refused": digest(str(error))}
    return {name: digest(text) for name, text in texts(plan).items()} | digests(plan.document)


def texts(plan: Plan) -> dict[str, str]:
    """The Python files of a plan's package, by name, without reading a weight."""
    return plan.emission.files(plan.document, lambda name: plan.weights.load(name).shape)


def digests(document: Mapping[str, Any]) -> dict[str, str]:
    """Of plan.json, but for the seconds that its search took: of each large field, and of all others together."""
    fields = {**document, "search": {**document["search"], "seconds": None}}
    rest = {name: value for name, value in fields.items() if name not in APART}
    return {name: digest(json.dumps(fields[name])) for name in APART} | {"rest": digest(json.dumps(rest))}


def digest(text: str | bytes) -> str:
    """Sixteen hexadecimal digits that stand for a text or a file."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


if __name__ == "__main__":
    main()
