"""`pdv cost train | adapt | evaluate | show | publish`: the model of how long kernels and collectives take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ir.errors import UsageError, WeightsError
from pdv.cli import values
from pdv.cli.long.progress import progress_bar
from pdv.cli.output import DebugOption, JsonOption, print_json, print_table, print_warning

if TYPE_CHECKING:
    from learned_cost.data.dataset import Dataset
    from learned_cost.data.kernel import Kernel
    from learned_cost.devices.device import DeviceRecord
    from learned_cost.evaluation.scoring import Evaluation
    from learned_cost.weights import Weights

app = typer.Typer(help="Train, score, show and publish the model that predicts how long kernels and collectives take.")
SHIPPED = "shipped"

Folders = Annotated[
    list[Path], typer.Option("--data", "-d", help="A folder of measurements; may be repeated.", show_default=False)
]
WeightFile = Annotated[
    Path | None, typer.Option("--weights", "-w", help="Of kernels (default: the shipped ones).", show_default=False)
]
CollectiveFile = Annotated[
    Path | None,
    typer.Option("--collective-weights", help="Of collectives (default: the shipped ones).", show_default=False),
]
DeviceFolder = Annotated[
    Path | None, typer.Option("--devices", help="Records of devices that do not ship, NAME.yaml.", show_default=False)
]
DeviceNames = Annotated[
    list[str] | None, typer.Option("--device", help="Only rows of this device; may be repeated.", show_default=False)
]
WeightName = Annotated[
    Path, typer.Option("--output", "-o", help="NAME: writes NAME.safetensors and NAME.json.", show_default=False)
]
StartFrom = Annotated[
    str | None, typer.Option("--from", help="Fine-tune these weights: shipped, or a file.", show_default=False)
]
HoldoutDevices = Annotated[
    list[str] | None,
    typer.Option(help="Score on this device, and do not train on it; may be repeated.", show_default=False),
]
HoldoutFold = Annotated[
    int | None, typer.Option(help="Score on this fold of shapes, and do not train on it.", show_default=False)
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that say what cannot be, and count them.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


@app.command()
def train(
    data: Folders,
    output: WeightName,
    start: StartFrom = None,
    device: DeviceNames = None,
    holdout_device: HoldoutDevices = None,
    holdout_fold: HoldoutFold = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the rows.", min=1, show_default=False)] = None,
    budget: Annotated[str | None, typer.Option(help='Time of training: "2m", "90s".', show_default=False)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest.", min=0.0, show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="The same seed and data give the same weights.", min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint beside the output.")] = False,
    collectives: Annotated[bool, typer.Option("--collectives", help="Train the model of collectives.")] = False,
    devices: DeviceFolder = None,
    skip_bad: SkipBad = False,
    overwrite: Overwrite = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Train the kernel model on folders of measurements, or fine-tune weights on a few; or the model of collectives."""
    base = _weight_name(output, overwrite=overwrite)
    if collectives:
        if start or device or holdout_device or holdout_fold is not None or epochs or budget or learning_rate or resume:
            raise UsageError("--collectives takes --data, --devices and --skip-bad", mend="Leave out the other options")
        _train_collectives(data, devices, base, skip_bad=skip_bad, as_json=as_json)
        return
    seconds = None if budget is None else values.seconds(budget, "--budget")
    _need("torch", "torch_geometric", "pyarrow")

    from learned_cost.training.learner import GraphLearner
    from learned_cost.training.train import TrainOptions, fit_config
    from learned_cost.training.train import train as run

    learner = GraphLearner()
    begun = None if start is None else _weights(None if start == SHIPPED else Path(start), learner.layout)
    config = fit_config(
        fine_tuning=begun is not None, epochs=epochs, budget_s=seconds, learning_rate=learning_rate, seed=seed
    )
    options = TrainOptions(
        config, devices=tuple(device or ()), holdout_devices=tuple(holdout_device or ()), holdout_fold=holdout_fold,
        start=begun,
    )  # fmt: skip
    with progress_bar(quiet=as_json) as progress:
        progress("reading measurements", None)
        dataset = _read(data, devices, skip_bad=skip_bad)
        result = run(dataset, base, options, learner=learner, resume=resume, progress=progress)
    effort = f", {result.fitted.steps:,} steps, {result.fitted.seconds:.0f} s"
    _print_trained(result.weights, base, effort=effort, as_json=as_json)
    _warn_skipped({} if as_json else dataset.skipped)


def _train_collectives(data: list[Path], devices: Path | None, base: Path, *, skip_bad: bool, as_json: bool) -> None:
    _need("pyarrow")

    from learned_cost.collectives.fit import train_collectives
    from learned_cost.weights import save_weights

    dataset = _read(data, devices, skip_bad=skip_bad)
    _print_trained(save_weights(base, train_collectives(dataset)), base, as_json=as_json)
    _warn_skipped({} if as_json else dataset.skipped)


def _print_trained(weights: Weights, base: Path, *, effort: str = "", as_json: bool) -> None:
    training, metrics = weights.description["training"], weights.description["metrics"]
    if as_json:
        print_json("cost train", output=str(base), sha256=weights.digest, training=training, metrics=metrics)
        return
    from learned_cost.training.card import sentence

    rows = {"written": f"{base}.safetensors, {base.name}.json", "trained on": f"{training['rows']:,} rows{effort}"}
    if metrics:
        rows["held out"] = sentence(metrics["all"])
    print_table(rows)


@app.command()
def adapt(
    data: Folders,
    output: WeightName,
    start: Annotated[str, typer.Option("--from", help="The weights to adapt: shipped, or a file.")] = SHIPPED,
    device: Annotated[str | None, typer.Option(help="Where the data has several.", show_default=False)] = None,
    plan: Annotated[
        Path | None, typer.Option("--for-plan", help="Choose what to measure next among this package's kernels.")
    ] = None,
    following: Annotated[int, typer.Option("--next", help="How many kernels to measure next to name.", min=0)] = 5,
    devices: DeviceFolder = None,
    overwrite: Overwrite = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Correct weights by 10 to 50 kernels of a new device, in seconds; and say which kernels to measure next."""
    base = _weight_name(output, overwrite=overwrite)
    _need("pyarrow", *(("torch",) if plan is None else ()))
    from learned_cost.kernels.predict import Predictor
    from learned_cost.training.few_shot import adapt_file, choose_kernels

    with progress_bar(quiet=as_json) as progress:
        progress("reading measurements", None)
        weights = Predictor.load(None if start == SHIPPED else Path(start))
        found = adapt_file(weights, _read(data, devices, skip_bad=False), device, base)
        progress("choosing what to measure next", None)
        wanted = choose_kernels(found.predictor, _to_measure(found.device, plan), found.device, following)
    if as_json:
        errors = {"before": found.errors(found.before), "after": found.errors(found.after)}
        facts = {"output": str(base), "sha256": found.weights.digest, "device": found.device.name, "rows": found.used}
        print_json("cost adapt", **facts, given=found.given, **errors, next=[kernel.as_dict() for kernel in wanted])
        return
    print_table(found.told(base) | {f"measure next ({n})": kernel.text() for n, kernel in enumerate(wanted, 1)})


def _to_measure(device: DeviceRecord, plan: Path | None) -> list[Kernel]:
    """Kernels of a package and of its rivals, or of the example models."""
    if plan is not None:
        from learned_cost.describe import kernels_of
        from pdv.measure.deciding import of_package

        return kernels_of(of_package(plan))
    from learned_cost.profile.programs.planned import example_kernels

    return example_kernels(device)


@app.command()
def evaluate(
    data: Folders,
    weights: WeightFile = None,
    collective_weights: CollectiveFile = None,
    device: DeviceNames = None,
    fold: Annotated[int | None, typer.Option(help="Only this fold of shapes.", show_default=False)] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured, and the error by size, into this folder.")
    ] = None,
    devices: DeviceFolder = None,
    skip_bad: SkipBad = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Score weights on any folder of measurements: errors, intervals and ranks, by operator, device and source."""
    if plots is not None:
        from ir.files.writing import check_folder

        check_folder(plots, overwrite=True)
    _need("pyarrow")
    from learned_cost.evaluation.scoring import select

    with progress_bar(quiet=as_json) as progress:
        progress("reading measurements", None)
        dataset = select(_read(data, devices, skip_bad=skip_bad), devices=device or (), fold=fold)
        progress("predicting", None)
        found, used = _evaluate(dataset, weights, collective_weights)
        drawn = [] if plots is None else _draw(found, plots)
    if as_json:
        print_json("cost evaluate", data=[str(path) for path in data], weights=used, plots=drawn, **found.report)
        return
    _print_report(found.report)
    _warn_skipped(dataset.skipped)


@app.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="Weights (default: all that ship).", show_default=False)] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Print what weights were trained on and how well they did: the model card in short."""
    from learned_cost.training.card import facts
    from learned_cost.weights import SHIPPED as FOLDER
    from learned_cost.weights import load_weights

    paths = [file] if file is not None else sorted(FOLDER.glob("*.safetensors"))
    if not paths:
        raise WeightsError("no weights ship with this version", mend="`pdv cost train` makes some; name them")
    shown = [load_weights(path, None) for path in paths]
    if as_json:
        print_json("cost show", weights=[_describe(entry) for entry in shown])
        return
    for number, entry in enumerate(shown):
        print("\n" * min(number, 1), end="")
        print_table(facts(entry))


@app.command()
def publish(
    file: Annotated[Path, typer.Argument(help="Weights.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.", show_default=False)],
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", "-d", help="What to score them on (default: the shipped profiles)."),
    ] = None,
    devices: DeviceFolder = None,
    overwrite: Overwrite = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,  # read where errors are reported
) -> None:
    """Check weights, score them again, and write them with a model card and pictures as a folder for others."""
    from ir.files.writing import check_folder
    from learned_cost.data.dataset import SHIPPED as PROFILES
    from learned_cost.training.card import publish as write
    from learned_cost.weights import load_weights

    check_folder(output, overwrite=overwrite)
    _need("pyarrow", "matplotlib")
    checked = load_weights(file, None)
    with progress_bar(quiet=as_json) as progress:
        progress("reading measurements", None)
        dataset = _read(data or [PROFILES], devices, skip_bad=False)
        progress("scoring", None)
        own = (file, None) if checked.kind == "kernels" else (None, file)
        found, _ = _evaluate(dataset, *own, parts=(checked.kind,))
        told = ", ".join(path.name for path in data) if data else "the shipped profiles"
        names = write(checked, found, output, evaluated_on=told, overwrite=overwrite)
    if as_json:
        print_json("cost publish", output=str(output), files=names, **found.report)
    else:
        print_table({"written": f"{output}/", "files": ", ".join(names)})


def _weight_name(output: Path, *, overwrite: bool) -> Path:
    """Where weights go, checked before the work starts."""
    from learned_cost.weights import stem

    base = stem(output)
    if base.name in {"", ".."}:
        raise UsageError(f"-o: {str(output)!r} is a folder", mend="Name the weights in it")
    values.check_folder_of(base)
    for suffix in (".safetensors", ".json"):
        if base.with_name(base.name + suffix).exists() and not overwrite:
            raise UsageError(f"-o: {base}{suffix} exists", mend="Choose another name, or add --overwrite")
    return base


def _need(*packages: str) -> None:
    """Fail before the work starts where a package is missing."""
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        names = ", ".join(missing).replace("_", "-")
        raise UsageError(f"this needs {names}, not installed", mend="pip install 'pipedejavu[learned]'")


def _read(folders: list[Path], devices: Path | None, *, skip_bad: bool) -> Dataset:
    from learned_cost.data.dataset import read_folders
    from learned_cost.devices.device import load_records

    return read_folders(folders, devices=load_records(devices), skip_bad=skip_bad)


def _weights(path: Path | None, layout: str | None = None) -> Weights:
    """Of kernels: a file, or the shipped ones."""
    from learned_cost.weights import SHIPPED as FOLDER
    from learned_cost.weights import load_weights

    return load_weights(path or FOLDER / "kernels", "kernels", features=layout)


def _evaluate(
    dataset: Dataset,
    weights: Path | None,
    collective_weights: Path | None,
    *,
    parts: tuple[str, ...] = ("kernels", "collectives"),
) -> tuple[Evaluation, dict[str, Any]]:
    """The scores, and by what weights: name and digest by part."""
    from learned_cost.evaluation.scoring import evaluate as score
    from learned_cost.weights import training_facts

    kernels = collectives = None
    used: dict[str, Any] = {}
    seen: list[str] = []
    known_ops: list[str] = []
    if "kernels" in parts and (dataset.kernels is not None or dataset.graphs is not None):
        from learned_cost.kernels.predict import Predictor

        found = _weights(weights)
        kernels = Predictor.load(weights)
        seen, known_ops = training_facts(found, "by_device"), training_facts(found, "by_op")
        used["kernels"] = {"name": found.name, "sha256": found.digest}
    if "collectives" in parts and dataset.collectives is not None:
        from learned_cost.collectives.model import load_collective_model

        collectives = load_collective_model(collective_weights)
        used["collectives"] = {"name": str(collective_weights or SHIPPED)}
    return score(dataset, kernels, collectives, seen=seen, known_ops=known_ops), used


def _draw(found: Evaluation, folder: Path) -> list[str]:
    from ir.files.writing import unwritable
    from learned_cost.training.card import draw

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return [name for part in found.measured_s for name in draw(found, folder.name, part, folder)]


def _describe(entry: Weights) -> dict[str, Any]:
    """Without the numbers' normalisation, which is long and means nothing to a reader."""
    rest = {key: value for key, value in entry.description.items() if key != "model"}
    return {"name": entry.name, **rest}


def _print_report(report: Mapping[str, Any]) -> None:
    from learned_cost.training.card import sentence

    for part in ("kernels", "collectives"):
        if part not in report:
            continue
        found = report[part]
        print(f"{part}: {sentence(found['all'])}; {found['suspect']:,} suspect rows left out")
        for new in ("devices", "systems"):
            if found.get(f"unseen_{new}"):
                print(f"of {new} that the weights had not: {sentence(found[f'unseen_{new}'])}")
        if found.get("unknown_ops"):
            print(f"of operators that they had not: {', '.join(found['unknown_ops'])}")
        if found.get("ranks", {}).get("groups"):
            print(f"rank correlation within device and operator: Kendall {found['ranks']['kendall']:.3f}")
        for name in ("by_device", "by_family", "by_system", "by_collective"):
            if name in found:
                print()
                _print_groups(name.removeprefix("by_"), found[name])
        print()
    for name, graph in report.get("graphs", {}).items():
        totals = [f"{device} {entry['seconds'] * 1e3:.2f} ms" for device, entry in graph["by_device"].items()]
        print(f"{name}: {graph['kernels']} kernels, predicted {', '.join(totals) or 'on no device'}")


def _print_groups(what: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
    from learned_cost.training.card import percent

    print(f"{what:<36} {'rows':>9} {'error':>8} {'median':>8} {'90% holds':>9} {'roofline':>9}")
    for name, figures in groups.items():
        told = [percent(figures.get(key)) for key in ("mape", "median", "coverage_90", "roofline_mape")]
        print(f"{name[:36]:<36} {figures['rows']:>9,} {told[0]:>8} {told[1]:>8} {told[2]:>9} {told[3]:>9}")


def _warn_skipped(skipped: Mapping[str, int]) -> None:
    for reason, count in skipped.items():
        print_warning(f"left out {count:,} rows: {reason}")
