"""The rule generator: what it costs, which laws it keeps, and whether the check that proves them refuses wrong ones.

    python benchmarks/rules.py [--smoke] [--json OUT]

Laws are generated twice: as shipped, beside what people wrote, and from nothing, to see which laws of the lectures are
found that nobody gave. Every law and every parallel rule is proven again. Then rules are made wrong in one place; each
such mutant must be refused, unless it is a true law. What the exact evaluator proves or refuses is looked at in another
way too: both sides are run in float64, with the real functions, at sizes that the proof did not use.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from benchmarks.mutation import of_rules as parallel_mutations
from benchmarks.mutation.floats import agree
from benchmarks.mutation.lectures import megatron, shown
from benchmarks.mutation.of_laws import KINDS, mutants
from benchmarks.mutation.of_rules import PARALLEL_KINDS, parallel_mutants
from benchmarks.record import Record, arguments, table
from ir.errors import ShapeError, VerificationError
from pdv.plan.proofs import proof_statement
from pdv.rewrite import library
from pdv.rewrite.check import check_law
from pdv.rewrite.check_parallel import check_parallel_rules
from pdv.rewrite.generate.library import Generated, generate, written_library
from pdv.rewrite.generate.menu import ELEMENTS, FOLDS, WORLDS
from pdv.rewrite.instantiate import instantiate
from pdv.rewrite.law import Law
from pdv.rewrite.library import laws as library_laws
from pdv.rewrite.library import written_laws
from pdv.rewrite.sample import samples

MUTANTS = 700  # of laws that type-check, tried
OTHER_SEED = 1000  # of sizes that no proof here uses
CONFIRMED_AT = 8  # instances in float64
DRAWS = 400  # at most, to find them
DEGREES = (2, 3, 4, 8, 16)  # at which the lectures' transformer MLP is planned
COUNTS = ("enumerated", "implied", "candidates", "proven", "of use", "kept")
T = TypeVar("T")


@dataclass
class Clock:
    """CPU and wall seconds of each stage, by its name."""

    record: Record

    def timed(self, name: str, work: Callable[[], T]) -> T:
        """What ``work`` returns; its times are claimed."""
        cpu, wall = time.process_time(), time.perf_counter()
        found = work()
        wall = time.perf_counter() - wall
        self.record.claim(name, round(time.process_time() - cpu, 1), "CPU-s", f"{wall:.0f} s on the wall")
        return found


def main() -> None:
    """Generate, prove, derive, mutate."""
    options = arguments(str(__doc__).splitlines()[0]).parse_args()
    record = Record()
    clock = Clock(record)
    smoke: bool = options.smoke
    shipped = list(library_laws())
    if not smoke:
        beside = clock.timed("generation, proofs included", lambda: generate(WORLDS, written=written_laws()))
        _reproduced(record, beside)
    alone = clock.timed(
        "generation from nothing, proofs included", lambda: generate(ELEMENTS if smoke else (*WORLDS, *FOLDS))
    )
    _counted(record, alone, "from nothing: ")
    chosen = [*alone.laws, *shipped[:30]] if smoke else shipped
    clock.timed(f"{len(chosen)} laws proven again", lambda: [check_law(law, seed=1) for law in chosen])
    rules = clock.timed("all parallel rules proven again", check_parallel_rules)
    record.claim("parallel rules proven", rules, "rules", "degrees 2, 3, 4 and 2 x 2")
    record.claim("laws shipped, all proven", len(shipped), "laws", f"{len(written_laws())} of them written by people")
    _lectures(record, alone.laws, shipped)
    _tally(record, "law", KINDS, clock.timed("mutants of laws", lambda: mutated_laws(chosen, 40 if smoke else MUTANTS)))
    wrong = clock.timed("mutants of parallel rules", lambda: mutated_rules(every=60 if smoke else 1))
    _tally(record, "parallel rule", PARALLEL_KINDS, wrong)
    record.print_summary()
    record.write(options.json)


def _reproduced(record: Record, found: Generated) -> None:
    """Counts of what is shipped, and whether the file is what was made just now."""
    _counted(record, found, "")
    text = written_library(found, "pdv rules generate --max-ops 4 --seed 0")
    path = Path(library.__file__).parent / library.FILES[1]
    record.claim("shipped file reproduced byte for byte", text == path.read_text(encoding="utf-8"), "(1: yes)")


def _counted(record: Record, found: Generated, prefix: str) -> None:
    names = {"enumerated": "terms enumerated", "implied": "explained by laws found before",
             "candidates": "pairs that nothing explained", "proven": "of these proven at all sizes",
             "of use": "of these of use, and fusions", "kept": "laws kept"}  # fmt: skip
    for count in COUNTS:
        record.claim(f"{prefix}{names[count]}", found.counts[count], "")


def _lectures(record: Record, alone: Sequence[Law], shipped: Sequence[Law]) -> None:
    """Which of the lectures' laws follow from those found from nothing, which from those shipped; Megatron's MLP."""
    found, had = shown(alone), shown(shipped)
    record.rows += [{"lecture": name, "from nothing": found[name], "shipped": had[name]} for name in found]
    table(("law of the lectures", "from nothing", "shipped"), [(n, str(found[n]), str(had[n])) for n in found])
    for name, which in (("found from nothing", found), ("in the shipped library", had)):
        record.claim(f"laws of the lectures {name}", sum(which.values()), f"of {len(which)}")
    for degree in DEGREES:
        plan = megatron(degree)
        proof = proof_statement(plan.proof)
        record.rows.append({"megatron": degree, "rules": plan.rules, "moves": plan.moves, "proof": proof})
        print(f"MLP on {degree} devices: {', '.join(plan.rules)}; moves {', '.join(plan.moves)}; {proof}")
    good = sum(row.get("moves") == ("replicate", "reduce") for row in record.rows)
    record.claim("degrees at which Megatron's MLP is found and proven", good, f"of {len(DEGREES)}")


Rows = list[dict[str, str]]


def mutated_laws(laws: Sequence[Law], count: int) -> Rows:
    """A row for each of ``count`` mutants that type-check, and for those met on the way that do not."""
    rows: Rows = []
    tried = 0
    for mutant in mutants(laws, seed=0):
        verdict = judged(mutant.law)
        text = str(mutant.law).partition(": ")[2]
        rows.append({"law": mutant.source, "change": mutant.kind, "mutant": text, "verdict": verdict})
        tried += verdict != "ill-typed"
        if tried == count:
            break
    return rows


def mutated_rules(*, every: int) -> Rows:
    """A row for each wrong parallel rule."""
    rows: Rows = []
    for mutant in parallel_mutants(every=every):
        verdict = parallel_mutations.judged(mutant)
        rows.append({"rule": mutant.source, "change": mutant.kind, "mutant": mutant.changed, "verdict": verdict})
    return rows


def judged(law: Law) -> str:
    """ill-typed; refused by values or gradients, though floats agree or not; true, confirmed in floats or not."""
    try:
        check_law(law)
    except VerificationError as error:
        if error.check == "signature":
            return "ill-typed"
        alike = confirmed(law) and confirmed(law, seed=0, instances=DRAWS)  # at the sizes of the refusal too
        return "refused, floats agree" if alike else f"refused by {error.check}"
    return "true, confirmed" if confirmed(law) else "true, DISAGREES"


def confirmed(law: Law, *, seed: int = OTHER_SEED, instances: int = CONFIRMED_AT) -> bool:
    """Whether both sides agree in float64, outputs and gradients, at sizes of their own."""
    tried = 0
    for values in islice(samples(law, seed), DRAWS):
        try:
            left, right = instantiate(law, values)
        except ShapeError:
            continue
        if not agree(left, right, tried):
            return False
        tried += 1
        if tried == instances:
            break
    return tried > 0


def _tally(record: Record, what: str, kinds: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """A table of verdicts by kind of change; claims for each verdict; what was refused is kept as counts only."""
    verdicts = Counter(row["verdict"] for row in rows)
    by_kind = Counter((row["change"], row["verdict"]) for row in rows)
    names = sorted(verdicts)
    table((f"{what}: change", *names), [(kind, *(str(by_kind[kind, name]) for name in names)) for kind in kinds])
    for kind in kinds:
        record.rows.append({"mutants of": what, "change": kind} | {name: by_kind[kind, name] for name in names})
    record.rows += [dict(row) for row in rows if row["verdict"].startswith("true") or "floats" in row["verdict"]]
    tried = sum(count for name, count in verdicts.items() if name != "ill-typed")
    record.claim(f"mutants of a {what} tried", tried, "mutants")
    for name in names:
        record.claim(f"mutants of a {what} {name}", verdicts[name], "mutants")


if __name__ == "__main__":
    main()
