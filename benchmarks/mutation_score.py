"""Mutation score of what stands between a wrong program and its user: graphs, texts and laws made wrong in one place.

    python benchmarks/mutation_score.py [--count 1000] [--texts 150] [--laws 2000] [--seed 1] [--smoke] [--json OUT]

Proved plans of 15 models, on meshes whose axes differ, are changed in one place: collectives, gradients, weights,
numbers, constants, masks, positions, layers, outputs. Each mutant must be refused, by the validator of shardings, the
signature, the proof's values or its gradients; what none refuses is run whole in float64 against its source: it is
equal, or a survivor. Every layer is scored alone, too, and every eighth graph's text is run. Then emitted texts are
changed, and judged by running them at small sizes; then laws, by large and special constants. Bytes and hashes are not
compared at all.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from benchmarks.mutation.edit import Edit
from benchmarks.mutation.judge import LAYERS, Verdict, judged
from benchmarks.mutation.kinds import KINDS
from benchmarks.mutation.laws import LAW_KINDS, false_laws, verdict
from benchmarks.mutation.models import MODELS
from benchmarks.mutation.plans import Right, right_programs
from benchmarks.mutation.texts import TEXT_KINDS, Texted
from benchmarks.record import Record, arguments, table
from pdv.rewrite.library import laws as library_laws

TRIES = 6  # places of a kind in a program that are tried for a mutant that there is
SMOKE = ("tied", "means", "layers")


def main() -> None:
    """Judge mutants; print what refused them."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000, help="mutants of graphs")
    parser.add_argument("--texts", type=int, default=150, help="mutants of texts")
    parser.add_argument("--laws", type=int, default=2000, help="mutated laws that type-check")
    options = parser.parse_args()
    if options.smoke:
        options.count, options.texts, options.laws = 40, 10, 40
    names = SMOKE if options.smoke else tuple(MODELS)
    record = Record()
    started = time.process_time()
    rights = list(right_programs(names, options.seed, 1))
    graphs = list(islice(mutated_graphs(rights, options.seed), options.count))
    score(record, "graph", list(KINDS), graphs)
    graphs_s = time.process_time() - started
    texts = list(islice(mutated_texts(rights, options.seed), options.texts))
    score(record, "text", list(TEXT_KINDS), texts)
    wrong = score_laws(record, options.laws, options.seed)
    record.claim("models, on as many meshes", len(names), "")
    record.claim("CPU time of a graph's mutant", graphs_s / max(1, len(graphs)), "s")
    record.claim("CPU time", time.process_time() - started, "s")
    record.print_summary()
    record.write(options.json)
    if wrong or any(found.survives for _, found in (*graphs, *texts)):
        sys.exit(1)


Found = tuple[str, Verdict]


def mutated_graphs(rights: list[Right], seed: int) -> Iterator[Found]:
    """(kind, verdict) of mutants: of every program one of every kind, then another one, as long as there are any."""
    rng = random.Random(seed)
    places: dict[tuple[int, str], list[Edit]] = {}
    for number, right in enumerate(rights):
        for kind, make in KINDS.items():
            places[number, kind] = rng.sample(found := list(make(right.pcg, right.mesh)), len(found))
    made = 0
    while any(places.values()):
        for (number, kind), edits in places.items():
            for edit in [edits.pop() for _ in range(min(TRIES, len(edits)))]:
                found_one = judged(rights[number], edit, text=made % 8 == 0)
                if found_one is not None:
                    made += 1
                    _tell(rights[number].name, kind, edit.what, found_one)
                    yield kind, found_one
                    break


def mutated_texts(rights: list[Right], seed: int) -> Iterator[Found]:
    """(kind, verdict) of mutants of texts, in the same order."""
    rng = random.Random(seed)
    texts = [Texted(right) for right in rights]
    places = {
        (number, kind): rng.sample(found := text.places(kind), len(found))
        for number, text in enumerate(texts)
        for kind in TEXT_KINDS
    }
    while any(places.values()):
        for (number, kind), changes in places.items():
            for module, changed in [changes.pop() for _ in range(min(TRIES, len(changes)))]:
                found_one = texts[number].judged(module, changed)
                if found_one is not None:
                    what = f"{module.name}:{changed[0].lineno}: {module.of(changed[0])} -> {changed[1]}"
                    _tell(rights[number].name, kind, what, found_one)
                    yield kind, found_one
                    break


def _tell(model: str, kind: str, what: str, found: Verdict) -> None:
    if found.survives:
        print(f"SURVIVOR: {model}: {kind}: {what}", file=sys.stderr)


def score(record: Record, what: str, kinds: list[str], found: list[Found]) -> None:
    """A row for each kind: mutants, refused by each layer alone, equal at full size, survivors."""
    rows = []
    for kind in kinds:
        of_kind = [verdict for name, verdict in found if name == kind]
        alone = Counter(layer for each in of_kind for layer in each.refused)
        row: dict[str, object] = {"mutants of a": what, "kind": kind, "mutants": len(of_kind)}
        row |= {layer: alone[layer] for layer in LAYERS}
        row |= {"equal": sum(each.equal is True for each in of_kind), "survivors": sum(x.survives for x in of_kind)}
        rows.append(row)
    record.rows += rows
    columns = ("kind", "mutants", *LAYERS, "equal", "survivors")
    table(columns, [tuple(str(row[column]) for column in columns) for row in rows])
    verdicts = [verdict for _, verdict in found]
    record.claim(f"mutants of a {what}", len(found), "mutants", f"{len({kind for kind, _ in found})} kinds")
    for layer in LAYERS:
        record.claim(
            f"mutants of a {what} refused first by {layer}", sum(x.first == layer for x in verdicts), "mutants"
        )
    record.claim(f"mutants of a {what} equal at full size", sum(x.equal is True for x in verdicts), "mutants")
    record.claim(f"mutants of a {what} that survive and are wrong", sum(x.survives for x in verdicts), "mutants")


def score_laws(record: Record, count: int, seed: int) -> int:
    """A row for each kind of change to a law; how many false ones were accepted."""
    found: Counter[tuple[str, str]] = Counter()
    tried = 0
    for false in false_laws(list(library_laws()), seed):
        if tried >= count:
            break
        said = verdict(false)
        found[false.kind, said] += 1
        tried += said != "ill-typed"
        if said == "ACCEPTED WRONGLY":
            print(f"ACCEPTED WRONGLY: {false.law.text}", file=sys.stderr)
    names = ("refused", "true", "ill-typed", "ACCEPTED WRONGLY")
    table(("law: kind", *names), [(kind, *(str(found[kind, name]) for name in names)) for kind in LAW_KINDS])
    for kind in LAW_KINDS:
        record.rows.append({"mutants of a": "law", "kind": kind} | {name: found[kind, name] for name in names})
    record.claim("mutated laws that type-check", tried, "laws", f"{len(LAW_KINDS)} kinds")
    for name in names:
        record.claim(f"mutated laws {name}", sum(n for (_, said), n in found.items() if said == name), "laws")
    return sum(n for (_, said), n in found.items() if said == "ACCEPTED WRONGLY")


if __name__ == "__main__":
    main()
