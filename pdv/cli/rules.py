"""`pdv rules generate | check | list`: the algebraic laws, found, proven, and which of them a model uses."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ir.errors import UsageError, VerificationError
from ir.files.writing import write_whole
from pdv.cli import values
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json

app = typer.Typer(help="Generate, prove and list the laws that the search may apply.")
MAX_OPS = 4


@app.command()
def generate(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the laws here (default: print them).")
    ] = None,
    max_ops: Annotated[int, typer.Option(help="Operators of a side, at most.", min=1, max=6)] = MAX_OPS,
    seed: Annotated[int, typer.Option(help="Of the values at which terms are compared.")] = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Enumerate small programs, pair them by their values over Z_p, prove each pair, and keep what is of use."""
    from pdv.rewrite.generate.library import generate as find
    from pdv.rewrite.generate.library import written_library
    from pdv.rewrite.library import written_laws

    if output is not None:
        values.check_file(output)
    started = time.process_time()
    with progress_bar(quiet=as_json) as progress:
        found = find(max_ops=max_ops, seed=seed, written=written_laws(), report=progress)
    command = f"pdv rules generate --max-ops {max_ops} --seed {seed}"
    text = written_library(found, command)
    if output is not None:
        write_whole(output, text.encode())
    if as_json:
        counts = {**found.counts, "cpu_s": round(time.process_time() - started, 1)}
        print_json("rules generate", counts=counts, laws=[str(law) for law in found.laws])
    elif output is None:
        print(text, end="")
    else:
        print(f"{output}: {len(found.laws)} laws, each proven")


@app.command()
def check(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of laws (default: those shipped).", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the values and sizes at which they are tried.")] = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Prove every law again, and with the shipped ones every parallel rule of every operator."""
    from pdv.rewrite.check import check_law
    from pdv.rewrite.check_parallel import check_parallel_rules
    from pdv.rewrite.library import laws, read_laws

    chosen = [law for path in files for law in read_laws(path)] if files else list(laws())
    false: list[VerificationError] = []
    with progress_bar(quiet=as_json) as progress:
        for number, law in enumerate(chosen):
            progress(law.name, number / len(chosen))
            try:
                check_law(law, seed=seed)
            except VerificationError as error:
                false.append(error)
        parallel = 0 if files else check_parallel_rules(seed=seed, report=progress)
    if false:
        more = f" (and {len(false) - 1} more of {len(chosen)} laws are wrong)" if len(false) > 1 else ""
        allowed = false[0].allowed or "Laws whose sides are equal, gradients too, wherever both have a type"
        raise VerificationError(f"{false[0].what}{more}", allowed, "Correct the law, or take it out", check="values")
    if as_json:
        print_json("rules check", laws=len(chosen), parallel_rules=parallel, verified=True)
    else:
        told = f"{len(chosen)} law{'s' if len(chosen) > 1 else ''}"
        print(f"{told}: proven" if files else f"{told} and {parallel} parallel rules: all proven")


@app.command("list")
def list_rules(
    fired: Annotated[
        Path | None,
        typer.Option("--fired", help="Only the rules that match this model (an ONNX file).", show_default=False),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", "-c", help="Plan it for this cluster, and count uses.", show_default=False),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Global batch size, where the model leaves it open.", min=1)] = None,
    mode: Annotated[str, typer.Option(help="train or infer.")] = "train",
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """List the shipped laws; with --fired, where they match a model, and with --cluster, where its plan uses them."""
    if mode not in {"train", "infer"}:
        raise UsageError(f"--mode: {mode!r} is not known", "Allowed: train, infer", "Write --mode train")
    if fired is None:
        if cluster is not None or batch is not None:
            what = f"--{'cluster' if cluster is not None else 'batch'} is about a model, and none is given"
            raise UsageError(what, "It goes with --fired", "Add --fired MODEL, or leave it out")
        _list_all(as_json=as_json)
        return
    from pdv.rewrite.fired import find_fired as count
    from pdv.rewrite.library import all_rules

    with progress_bar(quiet=as_json) as progress:
        if cluster is None:
            from pdv.frontend import load_program

            progress("reading the model", None)
            graph, derivation = load_program(fired, batch=batch).graph, []
        else:
            from pdv.compile import optimize

            plan = optimize(
                fired, cluster=cluster, batch=batch, mode="infer" if mode == "infer" else "train", progress=progress
            )
            graph, derivation = plan.source, plan.document["derivation"]
        progress("matching", None)
        rows = count(all_rules(), graph, derivation)
    if as_json:
        print_json("rules list", model=str(fired), fired=[asdict(row) for row in rows])
        return
    width = max((len(row.rule) for row in rows), default=4)
    print(f"{'uses':>5} {'matches':>8}  {'rule':<{width}}  equation")
    for row in rows:
        print(f"{row.uses:>5} {row.matches:>8}  {row.rule:<{width}}  {row.equation}")


def _list_all(*, as_json: bool) -> None:
    from pdv.rewrite.library import laws

    if as_json:
        print_json("rules list", laws=[str(law) for law in laws()])
        return
    for law in laws():
        print(law)
