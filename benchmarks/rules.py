"""The rule generator: what it costs, how many laws it keeps, and whether the check that proves them refuses wrong ones.

    python benchmarks/rules.py [--smoke] [--json OUT]

Every kept law and every parallel rule is proven again. Then laws are made wrong in one place; each such mutant must be
refused, unless it is a true law. Those that the exact evaluator proves are confirmed in another way: both sides are
run in float64, with the real functions, at sizes that the proof did not use.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.mutations import KINDS, Mutant, mutants
from benchmarks.record import Record, arguments, table
from ir.errors import ShapeError, VerificationError
from ir.graph import Graph
from ir.interpret import evaluate
from pdv.rewrite.check import check_law
from pdv.rewrite.check_parallel import check_parallel_rules
from pdv.rewrite.generate.library import Generated, generate
from pdv.rewrite.generate.menu import ELEMENTS, WORLDS
from pdv.rewrite.instantiate import instantiate
from pdv.rewrite.law import Law
from pdv.rewrite.library import laws as library_laws
from pdv.rewrite.library import written_laws
from pdv.rewrite.sample import samples

OTHER_SEED = 1000  # of sizes that no proof here uses
CONFIRMED_AT = 8  # instances in float64


def main() -> None:
    """Generate, prove, mutate."""
    options = arguments(str(__doc__).splitlines()[0]).parse_args()
    record = Record()
    started = time.process_time()
    found = generate(ELEMENTS if options.smoke else WORLDS, written=() if options.smoke else written_laws())
    generated_s = time.process_time() - started
    laws = {str(law).partition(": ")[2]: law for law in (*found.laws, *library_laws())}
    chosen = list(laws.values())[:40] if options.smoke else list(laws.values())
    started = time.process_time()
    for law in chosen:
        check_law(law, seed=1)
    proven_s = time.process_time() - started
    started = time.process_time()
    parallel = check_parallel_rules()
    parallel_s = time.process_time() - started
    _show(found, generated_s, proven_s, len(chosen), parallel, parallel_s)
    verdicts = _mutate(chosen, 40 if options.smoke else 700, record)
    if not options.smoke:
        _claim(record, found, generated_s, proven_s, len(chosen), parallel, verdicts)
    record.print_summary()
    record.write(options.json)


def _show(found: Generated, generated_s: float, proven_s: float, proven: int, parallel: int, parallel_s: float) -> None:
    counts = found.counts
    rows = [(name, str(counts[name])) for name in ("enumerated", "implied", "candidates", "proven", "of use", "kept")]
    rows.append(("generation, CPU-s", f"{generated_s:.1f}"))
    rows.append((f"proving {proven} laws again, CPU-s", f"{proven_s:.1f}"))
    rows.append((f"proving {parallel} parallel rules, CPU-s", f"{parallel_s:.1f}"))
    table(("", ""), rows)


def _mutate(laws: list[Law], count: int, record: Record) -> Counter[str]:
    """Try ``count`` mutants that type-check; a row for each that is tried."""
    verdicts: Counter[str] = Counter()
    by_kind: Counter[tuple[str, str]] = Counter()
    for mutant in mutants(laws, seed=0):
        verdict = judged(mutant)
        verdicts[verdict] += 1
        by_kind[mutant.kind, verdict] += 1
        row: dict[str, Any] = {"law": mutant.source, "change": mutant.kind, "verdict": verdict}
        record.rows.append(row | ({"mutant": str(mutant.law)} if verdict.startswith("true") else {}))
        if sum(verdicts.values()) - verdicts["ill-typed"] == count:
            break
    names = sorted(verdicts)
    table(("change", *names), [(kind, *(str(by_kind[kind, name]) for name in names)) for kind in KINDS])
    return verdicts


def judged(mutant: Mutant) -> str:
    """refused by values, refused by gradients, ill-typed, or true (confirmed in floats, or else: DISAGREES)."""
    try:
        check_law(mutant.law)
    except VerificationError as error:
        return "ill-typed" if error.check == "signature" else f"refused by {error.check}"
    return "true, confirmed" if confirmed(mutant.law) else "true, DISAGREES"


def confirmed(law: Law) -> bool:
    """Whether both sides agree in float64, outputs and gradients, at sizes of their own."""
    tried = 0
    for values in islice(samples(law, OTHER_SEED), 400):
        try:
            left, right = instantiate(law, values)
        except ShapeError:
            continue
        if not agree(left, right, tried):
            return False
        tried += 1
        if tried == CONFIRMED_AT:
            break
    return tried > 0


def agree(left: Graph, right: Graph, seed: int) -> bool:
    """Both programs on the same random numbers."""
    rng = np.random.default_rng(seed)
    given: dict[str, Any] = {}
    for node in (*left.nodes, *right.nodes):
        if node.is_leaf and node.name not in given:
            shape = node.type.shape
            floating = node.type.dtype.is_floating
            given[node.name] = rng.uniform(0.5, 1.5, shape) if floating else rng.integers(0, 2, shape)
    cotangents = {name: rng.normal(size=node.type.shape) for name, node in left.outputs}
    one, other = (_run(graph, given, cotangents) for graph in (left, right))
    zero = np.zeros(())
    return all(
        np.allclose(one.get(name, zero), other.get(name, zero), rtol=1e-9, atol=1e-9)
        for name in one.keys() | other.keys()
    )


def _run(graph: Graph, given: Mapping[str, Any], cotangents: Mapping[str, Any]) -> dict[str, Any]:
    found = evaluate(graph, given)
    gradients = {f"gradient {name}": value for name, value in found.gather_gradients(cotangents).items()}
    return {**found.gather(), **gradients}


def _claim(
    record: Record,
    found: Generated,
    generated_s: float,
    proven_s: float,
    proven: int,
    parallel: int,
    verdicts: Counter[str],
) -> None:
    record.claim("terms enumerated", found.counts["enumerated"], "terms")
    record.claim("laws kept of those generated", len(found.laws), "laws")
    record.claim("generation and verification", generated_s, "CPU-s")
    record.claim("laws shipped and proven again", proven, "laws", f"in {proven_s:.0f} CPU-s")
    record.claim("parallel rules proven", parallel, "rules")
    for verdict, count in sorted(verdicts.items()):
        record.claim(f"mutants {verdict}", count, "mutants")


if __name__ == "__main__":
    main()
