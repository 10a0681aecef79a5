"""Noise of torch's modules that is steady: what they draw is what the IR's evaluation draws (``ir.ops.draws``).

Entry point: ``SteadyNoise``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ir.ops.draws import normal_of, steady_integers, steady_uniform
from pdv.frontend.torch.draws import DRAWS, drawn_by


class SteadyNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While this lasts, whatever is drawn at random is made of steady noise between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``func``, and steady noise in place of what it drew."""
        options = kwargs or {}
        found = func(*args, **options)
        if (name := drawn_by(func)) not in DRAWS or not isinstance(found, Tensor):
            return found
        arguments = func._schema.arguments  # noqa: SLF001
        named = {argument.name: argument.default_value for argument in arguments}
        named |= dict(zip(named, args, strict=False)) | options
        return found.copy_(_made(name, found, named))


def _made(name: str, found: Tensor, named: Mapping[str, Any]) -> Tensor:
    """What an operator makes of steady noise, in float64."""
    shape = tuple(found.shape)
    steady = torch.from_numpy(steady_uniform(shape)).to(found.device)
    made: Tensor = steady
    match name.removesuffix("_like"):
        case "randn":
            made = torch.from_numpy(normal_of(steady.numpy()))
        case "normal":
            made = torch.from_numpy(normal_of(steady.numpy())) * named["std"] + named["mean"]
        case "uniform":
            made = steady * (named["to"] - named["from"]) + named["from"]
        case "randint":
            made = torch.from_numpy(steady_integers(steady.numpy(), named.get("low", 0), named["high"]))
        case "exponential":
            made = torch.log1p(-steady) * (-1 / named["lambd"])
        case "bernoulli":
            made = steady < named.get("p", named["self"])
    return made
