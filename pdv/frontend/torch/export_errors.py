"""Why a module cannot be exported: the cause in a sentence, the line of the model, and what to do.

Entry points: ``export_error``, ``check_norms``, ``check_asked``, ``is_of_transforms``; ``remedy``, of operators that no
program may have.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Collection, Set
from pathlib import PurePath

import torch

from ir.errors import ModelError, first_line
from pdv.frontend.torch.opaque import REFUSED

_OTHERS = (str(PurePath(torch.__file__).parent), str(PurePath(__file__).parents[2]))  # whose lines are not the model's
_TRANSFORMS = tuple(str(PurePath("_functorch", name)) for name in ("vmap.py", "eager_transforms.py", "apis.py"))
_TRANSFORMER = str(PurePath("torch", "nn", "modules", "transformer.py"))
_NUMBERS = re.compile(r"\.(tolist|item)\(\)")
# no program without open sizes has such but of values
_OF_TRACING = re.compile("FakeTensor|Sym(Int|Float|Bool)|its data is not allocated")
_BY_VALUE = re.compile(r"data-dependent expression (.+?) \(unhinted")


_INSTEAD = {
    REFUSED[torch.Tag.data_dependent_output]: "Give such numbers as Python's own (ints, lists of them): those are "
    "constants of the program",
    REFUSED[torch.Tag.dynamic_output_shape]: "Choose ahead of the model, and pass in what is chosen (edges with their "
    "loops, in place of add_self_loops); or compute with all elements, and give those that are not chosen a weight of "
    "zero (torch.where); or choose a fixed number (topk)",
}
"""What to do about operators that no declaration makes part of a program."""


def export_error(module: torch.nn.Module, error: Exception) -> ModelError:
    """What torch.export raised of a module, in one screen."""
    name, where = type(module).__name__, _line(error)
    if (found := _BY_VALUE.search(str(error))) or _OF_TRACING.search(first_line(error)):
        said = f" ({found[1]})" if found else ""
        return ModelError(
            f"{name} cannot be exported: what it runs depends on values of tensors{said}{where}",
            "Programs that are the same for all values",
            _remedy(module, error, where),
        )
    if "_ctc_loss" in first_line(error):
        return ModelError(
            f"{name} cannot be exported: where the targets of a row of ctc_loss lie depends on lengths{where}",
            "Targets that are rows, [n, s], or labels.masked_select(mask) of lengths mask.sum(-1)",
            "Pad them; or return the log probabilities, and take the loss outside of the module: "
            "model.train_step(x, y, loss_fn)",
        )
    if is_of_transforms(error):
        return ModelError(
            f"{name} cannot be exported: it takes derivatives inside of forward (torch.func, autograd.grad){where}",
            "Modules that leave derivatives to training; vmap alone goes",
            "Take them in the loss, or write their formula out over the whole batch",
        )
    return ModelError(
        f"{name} cannot be exported: {first_line(error)}{where}",
        "",
        _suggest(error) or "See that torch.export.export(module, example_inputs) works",
    )


def check_norms(module: torch.nn.Module) -> None:
    """Whether batch norms that train move their statistics by a share that is known.

    Raises:
        ModelError: naming those that count their batches instead, which is a number that steers the program.
    """
    names = [
        name or type(module).__name__
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)  # noqa: SLF001  # the class of all of them
        and part.training and part.track_running_stats and part.momentum is None
    ]  # fmt: skip
    if names:
        raise ModelError(
            f"batch norms with momentum=None: {', '.join(names[:3])}{', ...' if names[3:] else ''}. They take the mean "
            "over all batches so far, whose number is a tensor",
            "Running statistics that move by a known share",
            "Give them a momentum, e.g. 0.1",
        )


def check_asked(overwritten: Set[str]) -> None:
    """Whether buffers whose values steer the program stay as they are.

    Raises:
        ModelError: naming those that it overwrites.
    """
    if overwritten:
        raise ModelError(
            f"what the module runs depends on values of buffers that it overwrites: {', '.join(sorted(overwritten))}",
            "Programs that are the same in each call",
            "Count in the training loop, and plan the module as it is after its first calls",
        )


def is_of_transforms(error: BaseException) -> bool:
    """Whether it comes of torch.func's transforms, or of a gradient that forward takes."""
    return _passes(error, *_TRANSFORMS) or "fake tensor in the exported program" in str(error)


def _passes(error: BaseException, *ends: str) -> bool:
    """Whether it came by way of a file whose path ends so."""
    return any(frame.filename.endswith(ends) for frame in traceback.extract_tb(error.__traceback__))


def _line(error: BaseException) -> str:
    """``, at file.py:7: its text`` of the model's line that was run last; empty if it has none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_model(frame.filename)]
    if not frames:
        return ""
    path, number = frames[-1].filename, frames[-1].lineno or 0
    text = linecache.getline(path, number).strip()
    return f", at {PurePath(path).name}:{number}: {text}" if text else f", at {PurePath(path).name}:{number}"


def _is_of_model(path: str) -> bool:
    return not path.startswith("<") and not path.startswith(_OTHERS)


def _remedy(module: torch.nn.Module, error: Exception, where: str) -> str:
    """What to change: options of the model by which it need not look at values, if it has such."""
    configs = [one for part in module.modules() if hasattr(one := getattr(part, "config", None), "__dict__")]
    dropped = sorted({name for one in configs for name, value in vars(one).items() if "layerdrop" in name and value})
    if dropped:
        return f"Set {', '.join(dropped)} of its configuration to 0: layers are skipped by chance"
    if "label" in where and any(getattr(one, "problem_type", "") is None for one in configs):
        return 'Set problem_type of its configuration, e.g. "single_label_classification"'
    if _passes(error, _TRANSFORMER):  # models' own lines about masks know no such argument
        return "Say what the mask is (is_causal=, tgt_is_causal=), for torch looks at its values else"
    if "pack" in where.lower():
        return "Give recurrent layers padded sequences, and take of each row what stands at its length (gather)"
    if ": for " in where:
        return "Loop over a fixed number, e.g. all experts, and give what is not chosen a weight of zero"
    if _NUMBERS.search(where) and ": if " not in where:
        return "Give such numbers as Python's own (ints, lists of them): those are constants of the program"
    return "Decide it by an option or by shapes, or compute both sides and choose with torch.where"


def _suggest(error: Exception) -> str:
    """The dims that torch would take in place of those given, if it says so."""
    _, found, rest = str(error).partition("Suggested fixes:\n")
    lines = [line.strip() for line in rest.splitlines() if line.startswith("  ")]
    return f"torch suggests: {'; '.join(lines)}" if found and lines else ""


def remedy(unsupported: Collection[str]) -> str:
    """What to do where all that is refused depends on values; empty for what the error says of operators at large."""
    found = {why: mend for why, mend in _INSTEAD.items() if any(f"{why})" in text for text in unsupported)}
    known = all(any(f"{why})" in text for why in found) for text in unsupported)
    return "; ".join(found.values()) if known else ""
