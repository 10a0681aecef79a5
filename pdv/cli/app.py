"""`pdv`: the commands put together, and the one place where an error becomes a message and an exit code.

0 done, 2 usage, 3 bad model, 4 unsupported operators, 5 bad cluster, 6 no plan fits, 7 verification failed,
8 bad measurements or weights, 9 cannot write, 10 interrupted, and the best plan so far was taken,
11 some of several jobs failed, 70 our own fault, 130 interrupted, 143 and 129 told to end (SIGTERM, SIGHUP).
"""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import typer

import pdv
from ir.errors import InternalError, NoPlanFitsError, PdvError, UsageError
from ir.files.signals import ENDING
from pdv.cli import cluster, cost, diff, doctor, explain, launch, optimize, profile, rules, simulate, verify
from pdv.cli.engines import exporting, importing
from pdv.cli.jobs import plan
from pdv.cli.output import leave_streams, open_streams, print_error
from pdv.guard import guarded

ALLOCATED = 50_000  # objects, beyond which cycles are looked for: by default (700) that is 7 % of a search's time
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
ENDED = frozenset(128 + number for number in ENDING)

COMMANDS = (
    "optimize", "plan", "verify", "explain", "report", "simulate", "diff", "export", "import", "launch", "bench",
    "reshard", "cluster", "doctor", "rules", "profile", "cost",
)  # fmt: skip
GROUPS = ("cluster", "rules", "cost")  # those that have commands of their own

app = typer.Typer(
    name="pdv",
    help="Turn a single-device model into a sharded PyTorch program, proved equal, for the cluster at hand.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # markdown and its panels take half of the time of `pdv --help`
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(optimize.optimize)
app.command()(plan.plan)
app.command()(verify.verify)
app.command()(explain.explain)
app.command()(explain.report)
app.command()(simulate.simulate)
app.command()(diff.diff)
app.command()(exporting.export)
app.command(name="import")(importing.import_)
app.command()(launch.launch)
app.command()(launch.bench)
app.command()(launch.reshard)
app.add_typer(cluster.app, name="cluster")
app.add_typer(rules.app, name="rules")
app.command()(profile.profile)
app.add_typer(cost.app, name="cost")
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pdv {pdv.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Turn a single-device model into a sharded PyTorch program, proved equal, for the cluster at hand."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    gc.set_threshold(ALLOCATED)
    open_streams()
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, _end_in_order)
    code = run(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said and done
    leave_streams()
    sys.exit(code)


def _end_in_order(number: int, _: object) -> None:
    """By way of what removes all that is half-written; told so again, this process ends at once."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command; every message is printed by then."""
    words = list(arguments) or ["--help"]
    as_json, debug = "--json" in words, "--debug" in words
    command = " ".join(words[:2] if words[0] in GROUPS else words[:1])
    try:
        with guarded(f"pdv {command}"):
            code = _ran(words)
            _flush()
    except PdvError as error:
        return _report(error, command, as_json=as_json, debug=debug)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:
        if not isinstance(end.code, int) or end.code not in ENDED:
            raise
        print_error(command, "interrupted", "told to end; nothing was written", end.code, as_json=as_json)
        return end.code
    if code == INTERRUPTED:  # typer turns the interrupt into this code
        print_error(command, "interrupted", "interrupted; nothing was written", INTERRUPTED, as_json=as_json)
    return code if isinstance(code, int) else 0


def _flush() -> None:
    """Print what is held back, so that a full disk shows while there is somebody to tell."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _ran(words: list[str]) -> object:
    """What the command returns.

    Raises:
        UsageError: what typer itself found wrong with the words.
    """
    if "" in words or any(word.endswith("=") for word in words):
        _refuse_empty_paths(words)
    try:
        return app(args=words, prog_name="pdv", standalone_mode=False)
    except typer.TyperException as error:
        others = _commands_with(getattr(error, "option_name", ""))
        raise UsageError(error.format_message(), others, _usage_hint(words)) from error
    except SystemExit as end:  # which typer makes of every broken pipe, without a word
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise


def _refuse_empty_paths(words: list[str]) -> None:
    """See that no path is empty: it would be the folder that one is in, and is a variable of a shell that is not set.

    Raises:
        UsageError: for one that is.
    """
    command = typer.main.get_command(app)
    own = words[: words.index("--")] if "--" in words else words  # behind it are words of a script
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    declared = {param.name: param for param in command.params}
    hints = get_type_hints(getattr(command.callback, "__wrapped__", command.callback))
    paths = {option for name, param in declared.items() if _is_path(hints.get(name)) for option in param.opts}
    others = {option for param in declared.values() if not getattr(param, "is_flag", False) for option in param.opts}
    for before, word in zip(["", *own], own, strict=False):
        name = word.removesuffix("=") if word.startswith("-") else before if before in others else ""
        if (not word and (not name or name in paths)) or (word.endswith("=") and name in paths and name != before):
            place = name or "an argument"
            raise UsageError(
                f"{place} is empty", "A path; that of this folder is .", "Is a variable of the shell not set?"
            )


def _is_path(hint: object) -> bool:
    """Whether a parameter of a command takes paths: one, one or none, or several."""
    return hint is Path or any(_is_path(each) for each in get_args(hint))


def _report(error: PdvError, command: str, *, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    facts = error.facts if isinstance(error, NoPlanFitsError) else {}
    if isinstance(error, InternalError):
        facts = {"report": error.report or None}
    print_error(command, error.slug, str(error), error.exit_code, as_json=as_json, facts=facts)
    return error.exit_code


def _commands_with(option: str) -> str:
    """Which commands have an option that one of them lacks."""
    known = typer.main.get_command(app).commands if option else {}  # type: ignore[attr-defined]  # it is a group
    found = [name for name, one in known.items() if any(option in param.opts for param in one.params)]
    return f"It is an option of {', '.join(f'`pdv {name}`' for name in found)}" if found else ""


def _usage_hint(words: list[str]) -> str:
    command = next((word for word in words if word in COMMANDS), "")
    return f"See `{' '.join(('pdv', command, '--help')) if command else 'pdv --help'}`"
