"""A module beside what is emitted of it, on two simulated ranks and on values of one's own choosing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pdv
from pdv.check.imports import Texts
from pdv.check.reference import Given
from pdv.check.run import observe
from pdv.check.small import full_pair
from pdv.emit.emission import module_texts, shapes_in
from pdv.plan.package import Plan
from tests.pdv.worlds import cluster

Gradients = dict[str, np.ndarray[Any, Any]]  # Any: floats
TOLERANCE = 1e-9  # of the largest element, in float64


def plan_for_two(module: nn.Module, inputs: Sequence[Tensor], pins: Mapping[str, Any] | None = None) -> Plan:
    """Over two devices, for training."""
    return pdv.optimize(module, tuple(inputs), cluster=cluster(2), pins=pins)


def gap_of(plan: Plan, module: nn.Module, inputs: Sequence[Tensor]) -> float:
    """How far outputs and gradients of the emitted text are from the module's: the worst of all ranks, relative.

    The loss is the sum of outputs times random cotangents. Not-a-numbers must be at the same places.
    """
    source = module.double().train()
    given = [x.double() if x.is_floating_point() else x for x in inputs]
    outputs = [x for x in tree_leaves(source(*given)) if isinstance(x, Tensor)]
    random = np.random.default_rng(0)
    names = [name for name, _ in plan.source.outputs]
    cotangents = {name: random.normal(size=x.shape) for name, x in zip(names, outputs, strict=True)}
    source.zero_grad()
    terms = [(x * torch.from_numpy(np.asarray(c))).sum() for x, c in zip(outputs, cotangents.values(), strict=True)]
    total = torch.stack(terms).sum()
    torch.autograd.backward([total])
    tied = plan.document.get("state", {}).get("names", {})  # of a tied weight the program has one name
    wanted = {tied.get(name, [name])[0]: p.grad.numpy() for name, p in source.named_parameters() if p.grad is not None}
    found, loss = _observe(plan, source, given, cotangents), float(total.detach())
    gaps: list[float] = [abs(rank.loss - loss) / max(1.0, abs(loss)) for rank in found if np.isfinite(loss)]
    for rank in found:
        gaps += [_gap(rank.gradients.get(name, np.zeros(())), gradient) for name, gradient in wanted.items()]
    return max(gaps)


def _observe(plan: Plan, source: nn.Module, inputs: Sequence[Tensor], cotangents: Mapping[str, Any]) -> list[Any]:
    shape_of = shapes_in(plan.weights)
    pair = full_pair(plan.source, plan.emission, shape_of)
    state = {name: x.detach().numpy().copy() for name, x in source.state_dict().items()}
    stored = {name: state[name] for name in pair.stored}
    names = [node.attr("name") for node in plan.source.inputs]
    values = {name: x.detach().numpy() for name, x in zip(names, inputs, strict=True)}
    given = Given(values, stored, dict(cotangents), np.ones(len(inputs[0])))
    texts = Texts(module_texts(plan.emission.body(shape_of)), Path("emitted"))
    return [first for first, _ in observe(pair, texts, {**stored, **pair.own_tensors(stored)}, given, train=True)]


def _gap(found: Any, wanted: Any) -> float:
    assert (np.isnan(found) == np.isnan(wanted)).all(), (found, wanted)
    finite = np.isfinite(wanted)
    assert (np.isfinite(found) == finite).all(), (found, wanted)
    scale = float(np.abs(wanted[finite]).max(initial=0.0)) or 1.0
    return float(np.abs(np.where(finite, found - wanted, 0.0)).max(initial=0.0)) / scale
