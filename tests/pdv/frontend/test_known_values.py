"""What a module makes of numbers alone has values while it is exported; nothing else has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from ir.errors import ModelError, UnsupportedOperatorsError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.torch.tracing.known_values import KnownValues

X = torch.arange(24.0).reshape(4, 6).sin()
Forward = Callable[["Asks", Tensor], Tensor]


class Asks(nn.Module):
    """A layer, a constant and a buffer, and a way through them that asks for values."""

    def __init__(self, way: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.steps = torch.tensor([0.5, 0.25])
        self.flag, self.level = nn.Buffer(torch.tensor(True)), nn.Buffer(torch.tensor(0.5))
        self.sizes = nn.Buffer(torch.tensor([[2, 1], [1, 3]]))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.layer(x))


def integrate(module: Asks, x: Tensor) -> Tensor:
    """Euler's steps over a grid that is looked at, as solvers of differential equations do."""
    times = torch.linspace(0, 1, 4)
    if not (times[1:] > times[:-1]).all():
        raise ValueError("not increasing")
    for before, after in pairwise(times):
        x = x + module.layer(x) * float(after - before)
    return x


def loop(module: Asks, x: Tensor) -> Tensor:
    for t in torch.arange(4):
        if t % 2 == 0:
            x = x * module.steps[0].item()
    return x if module.steps.sum() < 1 else x * 100


def overwrite(module: Asks, x: Tensor) -> Tensor:
    del module
    counts = torch.zeros(3)
    counts[1] = 1
    counts[2:].add_(2)
    counts *= 2
    return x + counts.max().item() if torch.equal(counts, torch.tensor([0.0, 2.0, 4.0])) else x


def counts(module: Asks, x: Tensor) -> Tensor:
    """Sizes that numbers say: of repeats, of what is not zero, and of what a mask chooses."""
    ends = torch.repeat_interleave(module.sizes[:, 1], module.sizes[:, 0]).cumsum(0)
    places = torch.nonzero(ends % 2).flatten()
    first, second = torch.split(x, [ends[0].item(), 6 - ends[0].item()], dim=1)
    return torch.cat([second, first], 1) * ends[ends > 2].sum().item() + places.tolist()[0] + len(torch.where(ends)[0])


def padded(module: Asks, x: Tensor) -> Tensor:
    """Audio codecs of transformers: widths of padding and bounds of slices are tensors that buffers make."""
    width, step, first = x.shape[1], module.sizes[1, 1], module.sizes[1, 0]
    frames = torch.ceil((width - module.sizes[0, 0]) / step + 1).to(torch.int64)
    return F.pad(x, (0, frames * step - width))[:, first : first + 6]  # type: ignore[misc]  # as they write it


def resized(module: Asks, x: Tensor) -> Tensor:
    """Positions of ViLT: of as many points as there are in a mask of ones."""
    del module
    heights, widths = (torch.ones(4, 3, 5, dtype=torch.long).sum(dim)[:, 0] for dim in (1, 2))
    grids = [
        # ViLT gives tensors, which torch takes though its types ask for numbers
        F.interpolate(each.reshape(1, 1, 2, 3), size=(height, width), mode="bilinear")  # type: ignore[arg-type]
        for each, height, width in zip(x, heights, widths, strict=True)
    ]
    return torch.cat(grids)


@pytest.mark.parametrize("way", [integrate, loop, overwrite, counts, padded, resized])
def test_numbers_alone_have_values(way: Forward) -> None:
    module = Asks(way)
    source = copy_of(module, X, train=True)
    assert check_reading(load_program(module, X).graph, source, train=True).endswith("are the same")


class Watch(TorchFunctionMode):
    """Notes whether the gradient mode is set, which torch's tracing would write into a program."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        del types
        self.called.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_values_are_computed_beside_the_program() -> None:
    watch = Watch()
    with watch, KnownValues(nn.Identity()):
        assert (torch.arange(3) * 2).tolist() == [0, 2, 4]
    assert "arange" in watch.called
    assert "_set_grad_enabled" not in watch.called


def counted(module: Asks, x: Tensor) -> Tensor:
    module.flag.fill_(True)
    return x if module.flag else x + 1


def counted_behind(module: Asks, x: Tensor) -> Tensor:
    y = x if (~module.flag).any() else x + 1
    module.flag.logical_not_()
    return y


def bound_anew(module: Asks, x: Tensor) -> Tensor:
    y = x if module.flag else x + 1
    module.flag = ~module.flag  # type: ignore[assignment]  # nn.Module makes it the buffer
    return y


@pytest.mark.parametrize("way", [counted, counted_behind, bound_anew])
def test_buffers_that_are_overwritten_steer_nothing(way: Forward) -> None:
    with pytest.raises(ModelError, match="depends on values of buffers that it overwrites: flag"):
        load_program(Asks(way), X)


def test_a_buffer_that_stays_is_a_constant() -> None:
    def way(module: Asks, x: Tensor) -> Tensor:
        return x.sin() if module.flag else x / 0

    module = Asks(way)
    source = copy_of(module, X, train=True)
    assert check_reading(load_program(module, X).graph, source, train=True).endswith("are the same")


def by_copy(module: Asks, x: Tensor) -> Tensor:
    del module
    return x if torch.zeros(6).copy_(x[0]).sum() > 0 else x + 1


def by_view(module: Asks, x: Tensor) -> Tensor:
    del module
    whole = torch.zeros(4)
    part = whole[1:]
    whole[2] = x[0, 0]
    return x if part.sum() > 0 else x + 1


def by_out(module: Asks, x: Tensor) -> Tensor:
    del module
    place = torch.zeros(6)
    torch.add(x[0].detach(), 1, out=place)
    return x if place.sum() > 0 else x + 1


def by_constant(module: Asks, x: Tensor) -> Tensor:
    steps = module.steps.clone()
    steps[0] = x[0, 0]
    return x if steps.sum() > 0 else x + 1


def by_chance_in_place(module: Asks, x: Tensor) -> Tensor:
    del module
    place = torch.zeros(4)
    part = place[:2]
    place.uniform_()
    return x if part.sum() > 0.5 else x + 1


@pytest.mark.parametrize(
    "way",
    [by_copy, by_view, by_out, by_constant, by_chance_in_place,
     lambda module, x: x if module.level > 0 else x + 1,
     lambda module, x: x if torch.rand(()) > 0.5 else x + 1,
     lambda module, x: x if torch.empty(3).sum() > 0 else x + 1,
     lambda module, x: x if module.layer.weight.detach().sum() > 0 else x + 1,
     lambda module, x: x if x.sum() > 0 else x + 1],
)  # fmt: skip
def test_what_depends_on_anything_else_has_none(way: Forward) -> None:
    module, state = Asks(way), torch.get_rng_state()
    with pytest.raises(ModelError, match="depends on values of tensors"):
        load_program(module, X)
    assert torch.equal(state, torch.get_rng_state())


def test_sizes_made_of_values_are_said_to_be_such() -> None:
    with pytest.raises(ModelError, match=r"depends on values of tensors.*test_known_values\.py"):
        load_program(Asks(lambda module, x: x * len(set((x > 0).sum(1).tolist()))), X)


def test_rows_that_a_mask_chooses_are_chosen_ahead_of_the_model() -> None:
    class Edges(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            kept = edges[:, edges[0] != edges[1]]
            return x[kept[0]] * x[kept[1]]

    with pytest.raises(UnsupportedOperatorsError, match="Choose ahead of the model, and pass in what is chosen"):
        load_program(Edges(), (X, torch.tensor([[0, 1, 2], [1, 1, 3]])))


def test_torchs_log_of_what_it_gave_up_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError):
        load_program(Asks(lambda module, x: x + torch.zeros(len(x) + 1, 6)), X)
    assert not capfd.readouterr().err
