"""`pdv launch DIR SCRIPT` starts a training script on a plan's devices, `pdv bench DIR` the plan's own steps;
`pdv reshard CKPT --to DIR` lets a script go on under another plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ir.errors import UsageError
from ir.files.writing import check_folder, make_folder
from pdv.cli import values
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json, print_table

if TYPE_CHECKING:
    from pdv.measure.bench import Asked


def launch(
    directory: Annotated[Path, typer.Argument(help="A package that `pdv optimize` wrote.", show_default=False)],
    script: Annotated[Path, typer.Argument(help="What trains it, and imports it by name.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, behind --.", show_default=False)
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="The hosts' addresses, as the cluster file orders them: a,b.")
    ] = None,
    port: Annotated[int, typer.Option(help="By which the processes find each other.", min=1, max=65535)] = 29500,
    form: Annotated[str, typer.Option("--for", help="Print for torchrun, slurm or kubernetes.")] = "torchrun",
    run: Annotated[bool, typer.Option("--run", help="Run the processes of this host.")] = False,
    node_rank: Annotated[int | None, typer.Option(help="Which of several hosts this is, from 0.", min=0)] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Print, or run, the commands that start a script on a plan's cluster: hosts, ranks in mesh order, environment."""
    from pdv.launch import WAYS, own_environment, read_launch
    from pdv.programs import run_to_end

    way = values.choice("--for", form, WAYS)
    names = tuple(name.strip() for name in hosts.split(",")) if hosts else ()
    found = read_launch(directory, script, arguments or (), names, port)
    if run:
        if way != "torchrun" or as_json:
            raise UsageError("--run starts torchrun on this host", mend="Leave --for and --json out")
        host = _own_place(len(found.processes), node_rank, named=bool(names))
        words = [sys.executable, "-m", "torch.distributed.run", *found.arguments(host)]
        raise typer.Exit(run_to_end(words, own_environment(found)).returncode)
    text = {"torchrun": found.torchrun, "slurm": found.slurm, "kubernetes": found.kubernetes}[way]()
    if as_json:
        commands = [["torchrun", *found.arguments(host)] for host in range(len(found.processes))]
        environment = dict(found.environment)
        print_json("launch", processes=list(found.processes), commands=commands, environment=environment, text=text)
    else:
        print(text)


def _own_place(count: int, node_rank: int | None, *, named: bool) -> int:
    """Which of the hosts this one is.

    Raises:
        UsageError: if there are several, and that, or the address of the first, is not said.
    """
    if count == 1 and node_rank in (None, 0):
        return 0
    if node_rank is None or node_rank >= count or not named:
        said = "no --node-rank" if node_rank is None else f"--node-rank {node_rank}"
        raise UsageError(
            f"--run on one of {count} hosts, with {said}{'' if named else ' and without --hosts'}",
            f"Allowed: --node-rank 0 to {count - 1}, and --hosts with the address of the first",
            "Run it on each host, with its own --node-rank",
        )
    return node_rank


def bench(
    directory: Annotated[Path, typer.Argument(help="A package that `pdv optimize` wrote.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to keep measurements in.")] = Path(
        "profiles"
    ),
    budget: Annotated[str, typer.Option(help="Time of the steps; kernels and collectives take as much again.")] = "10s",
    cost: Annotated[str | None, typer.Option(help="The files that priced the plan, if they do not ship.")] = None,
    no_keep: Annotated[bool, typer.Option("--no-keep", help="Run the steps and compare; keep nothing.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Run a package's own steps here, compare each part with its prediction, keep what was measured as a profile."""
    from pdv.measure.bench import Asked
    from pdv.measure.bench import bench as run
    from pdv.measure.told import told

    asked = Asked(directory, None if no_keep else output, values.seconds(budget, "--budget"), cost)
    with _kept_in(asked.folder), progress_bar(quiet=as_json) as progress:
        progress("running steps", None)
        found = run(asked)
        if found["record"] is not None:
            progress("measuring kernels", None)
            found["kept"] = {"folder": str(output), "kernels": _keep_kernels(asked, found)}
    if as_json:
        print_json("bench", directory=str(directory), **found)
    else:
        print_table(told(found))


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """The folder of measurements, made before the steps run, and gone again if nothing was kept.

    Raises:
        UsageError: if a file is there. WriteError: if the folder cannot be made.
    """
    if folder is None:
        yield
        return
    values.check_no_file(folder)
    make_folder(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _keep_kernels(asked: Asked, found: Mapping[str, Any]) -> int:
    """The plan's own kernels and their rivals', alone; how many rows the profile has more."""
    from learned_cost.profile.command import Options, measure
    from learned_cost.profile.programs.planned import of_plan
    from pdv.measure.deciding import of_package

    assert asked.folder is not None, "a record is named where measurements are kept"
    pieces = of_plan(of_package(asked.directory, asked.cost), asked.directory.name)
    options = Options(found["device"], asked.folder, asked.budget_s, known=str(found["record"]))
    return sum(measure(options, listed=pieces).measured.values()) if pieces else 0


def reshard(
    checkpoint: Annotated[
        Path, typer.Argument(help="A folder that torch.distributed.checkpoint wrote.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.", show_default=False)],
    to: Annotated[
        Path | None, typer.Option(help="The package that shall load it; without it, any plan of the model can.")
    ] = None,
    of: Annotated[
        Path | None, typer.Option("--from", help="The package that it was saved from, if it has that one's names.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Make of one plan's checkpoint what another plan loads: weights and the optimizer's state."""
    from pdv.loops.reshard import reshard as run

    check_folder(output, overwrite=overwrite)
    with progress_bar(quiet=as_json) as progress:
        progress("reading and writing tensors", None)
        told = run(checkpoint, output, of=of, to=to, overwrite=overwrite)
    if as_json:
        print_json("reshard", checkpoint=str(checkpoint), output=str(output), **told)
    else:
        print(f"{output}: {told['tensors']} entries ({', '.join(kind.format('*') for kind in told['kinds'])})")
        if told["others"]:
            print(f"as they were: {', '.join(told['others'])}")
