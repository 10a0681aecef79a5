"""Gradients summed in buckets behind backward are those of parameters summed one by one in autograd's graph."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pdv.emit.templates.parallel import all_gather, partition, reduce
from pdv.emit.templates.runtime import ParallelModule, Weights, local, make_mesh
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed
WIDTH, ROWS = 12, 8
PIECE_BYTES = 1500  # of a weight and a part of the next
Gradients = dict[str, Tensor | None]


class Mixed(ParallelModule):
    """Over dp and tp the batch is cut; parameters are whole, cut, tied, frozen, unused, used twice and over fewer axes.

    The first, odd one is of a size that no number of ranks divides.
    """

    def __init__(self, path: Path, bucket_mb: float, levels: dict[str, tuple[int, ...]], own: tuple[str, ...]) -> None:
        mesh = make_mesh({"dp": 2, "tp": 2}, "cpu", bucket_mb=bucket_mb, levels=levels, own_sums=own)
        mesh.sums.buckets.piece_bytes = PIECE_BYTES
        super().__init__(mesh, ("dp", "tp"))
        self.own_loss = "sum"
        self.dp, self.tp, self.both = mesh["dp"], mesh["tp"], mesh["dp", "tp"]
        weights = Weights(path)
        self.odd = mesh.parameter(weights["odd"])
        self.first, self.second, self.third = (mesh.parameter(weights[name]) for name in ("w", "v", "w"))
        self.cut = mesh.parameter(weights["v"], {"dp": 0})
        self.frozen, self.sometimes = mesh.parameter(weights["v"]), mesh.parameter(weights["w"])
        self.frozen.requires_grad_(False)  # torch's name
        self.use_sometimes = False
        self.checkpointed: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        both = self.both
        x = partition(partition(x, 0, self.dp), 0, self.tp) + local(self.odd, both).sum()
        x = torch.tanh(x @ local(self.first, both))
        x = torch.tanh(x @ local(self.second, self.dp, self.tp) @ local(self.frozen, both))
        x = x @ all_gather(local(self.cut, self.tp), 0, self.dp)
        if self.checkpointed is None:
            x = self.block(self.block(x))
        else:
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=self.checkpointed)
        return x + local(self.first, self.dp, self.tp)[0]

    def block(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ local(self.third, self.both))
        return x @ local(self.sometimes, self.both) if self.use_sometimes else x


def loss_of(model: Mixed, seed: int = 0) -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return reduce(model(x).square().sum(), model.both)


def backward(model: Mixed, *seeds: int) -> None:
    """One pass for each seed; the parameter that is used sometimes is used with odd ones."""
    for seed in seeds:
        model.use_sometimes = bool(seed % 2)
        torch.autograd.backward(loss_of(model, seed))


def whole(x: Tensor | None) -> Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor().clone()


def gradients(model: Mixed) -> Gradients:
    """Whole, and taken away."""
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        found[name] = None if parameter.grad is None else whole(parameter.grad)
    model.zero_grad()
    return found


def check(model: Mixed, *seeds: int) -> None:
    """The gradients that there are, against those of passes by autograd's graph."""
    found = gradients(model)
    with model.parameters_in_graph():
        backward(model, *seeds)
    wanted = gradients(model)
    assert {name for name, grad in wanted.items() if grad is not None} >= {"odd", "first", "second", "third", "cut"}
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12, msg=name)


def once(model: Mixed) -> None:
    for seed in (0, 1, 2):
        backward(model, seed)
        check(model, seed)


def added_up(model: Mixed) -> None:
    loss = loss_of(model)
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    backward(model, 1)
    check(model, 0, 0, 1)


def added_to_zeros(model: Mixed) -> None:
    backward(model, 0)
    model.zero_grad(set_to_none=False)
    kept = model.first.grad
    backward(model, 2)
    assert model.first.grad is kept
    check(model, 2)


def held_back(model: Mixed) -> None:
    with model.no_sync():
        backward(model, 0, 1)
    assert all(parameter.grad is None for parameter in model.parameters())
    backward(model, 2)
    assert not model.mesh.sums.is_waiting
    check(model, 0, 1, 2)
    with model.no_sync():
        backward(model, 3)
    model.flush()
    check(model, 3)
    with model.no_sync():
        backward(model, 3)
    model.zero_grad()
    model.flush()
    assert all(parameter.grad is None for parameter in model.parameters())


def summed_early(model: Mixed) -> None:
    """Of what is held, gradients that are complete are summed behind their last pass, and the rest by ``flush``."""
    sums = model.mesh.sums
    with model.no_sync():
        backward(model, 0)
        with sums.complete([model.odd, model.third, model.cut]):
            backward(model, 1)
        assert {id(leaf.parameter) for bucket in sums.buckets._running for leaf in bucket.leaves} == {
            id(parameter) for parameter in (model.odd, model.third, model.cut)
        }
        backward(model, 2)  # of what was taken for complete, too
    assert all(parameter.grad is None for parameter in model.parameters())
    model.flush()
    check(model, 0, 1, 2)
    with model.no_sync(), sums.complete(model.parameters()):
        backward(model, 1)
    assert sums.is_waiting  # though no leaf has a gradient
    model.zero_grad()
    assert not sums.is_waiting


def held_quietly(model: Mixed) -> None:
    """Within a step nothing is called back for what is held, before the last pass, and after it again."""
    sums = model.mesh.sums
    with patch.object(sums, "receive", wraps=sums.receive) as receive:
        with sums.hold_quietly():
            backward(model, 0, 1)
            assert not receive.called
            with sums.complete([model.odd, model.third]):
                backward(model, 2)
            assert {id(call.args[0].parameter) for call in receive.call_args_list} == {id(model.odd), id(model.third)}
        model.flush()
        check(model, 0, 1, 2)
        receive.reset_mock()
        backward(model, 1)
        assert receive.call_count > 2
        check(model, 1)
        with pytest.raises(OSError), sums.hold_quietly():  # of no text
            raise OSError
        receive.reset_mock()
        backward(model, 1)
        assert receive.call_count > 2
        check(model, 1)


def frozen_later(model: Mixed) -> None:
    model.second.requires_grad_(False)
    model.frozen.requires_grad_(True)
    backward(model, 0)
    model.second.requires_grad_(True)
    assert model.second.grad is None
    assert model.frozen.grad is not None
    model.frozen.requires_grad_(False)
    model.zero_grad()
    backward(model, 0)
    check(model, 0)


def hooked(model: Mixed) -> None:
    final: list[Tensor] = []
    handles = [
        model.first.register_post_accumulate_grad_hook(lambda p: final.append(whole(p.grad))),  # type: ignore[no-untyped-call]
        model.second.register_hook(lambda grad: 2 * grad),  # type: ignore[no-untyped-call]
    ]
    backward(model, 0)
    assert model.first.grad is not None
    assert len(final) == 1
    assert torch.equal(final[0], whole(model.first.grad))
    doubled = whole(model.second.grad)
    for handle in handles:
        handle.remove()
    model.zero_grad()
    backward(model, 0)
    torch.testing.assert_close(doubled, 2 * whole(model.second.grad), rtol=1e-12, atol=0)
    check(model, 0)


def checkpointed(model: Mixed) -> None:
    for reentrant in (False, True):
        model.checkpointed = reentrant
        backward(model, 1)
        model.checkpointed = None
        check(model, 1)


def broken_off(model: Mixed, of_step: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """A pass that fails leaves nothing behind, though an optimizer's ``zero_grad`` knows of no leaves."""

    def fail(grad: Tensor) -> None:
        raise OSError

    hidden = local(model.odd, model.both)
    optimizer = torch.optim.SGD(model.parameters())
    for held in (False, True):
        output = model(torch.ones(ROWS, WIDTH, dtype=torch.float64))
        handle = hidden.register_hook(fail)  # type: ignore[no-untyped-call]
        with pytest.raises(OSError), model.no_sync() if held else of_step():  # of no text
            torch.autograd.backward(reduce(output.sum(), model.both))
        handle.remove()
        optimizer.zero_grad()
        backward(model, 1)
        check(model, 1)


def exchanged(model: Mixed) -> None:
    """Other tensors in place of parameters are differentiated as any; a copy of a parameter has no leaves."""
    model.use_sometimes = False
    others = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.autograd.backward(reduce(functional_call(model, others, (x,)).square().sum(), model.both))
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = others[name].grad if parameter.requires_grad else None
    check(model, 0)
    copied: Any = copy.deepcopy(model.first)
    assert copied.leaves is None


def in_steps(model: Mixed) -> None:
    """In steps few leaves call back, once one was like that before; whatever a pass does, nothing is left out."""
    assert called_back(model, 0, 0, 1, 1, 2, 1)[1:] == [FEW, FEW, MANY, FEW, MANY]
    frozen_later(model)
    assert called_back(model, 0, 0, 0) == [FEW, MANY, FEW]
    model.frozen.requires_grad_(True)
    assert called_back(model, 0, 0, 0) == [FEW, MANY, FEW]
    model.frozen.requires_grad_(False)
    for model.checkpointed in (True, False, None):
        called_back(model, 1, 1, 1, 3)
    broken_off(model, model.mesh.sums.only_pass)
    assert called_back(model, 1, 1) == [FEW, FEW]
    held_back(model)
    backward(model, 1)  # no step: all call back
    check(model, 1)
    assert called_back(model, 1) == [FEW]
    with model.no_sync():
        backward(model, 1)
    with model.mesh.sums.only_pass():  # of more than one pass
        backward(model, 0)
    check(model, 1, 0)
    local(model.third, model.dp)  # a leaf more
    assert called_back(model, 1, 1) == [MANY, FEW]


def in_pieces(model: Mixed) -> None:
    """Numbers beside gradients are summed once, in a bucket or alone, whether passes are alike or not."""
    sums, rank = model.mesh.sums, float(dist.get_rank())
    for axes, total in ((model.both,), 6.0), ((model.dp, model.tp), 6.0), ((model.dp,), 2.0 + 2 * (rank % 2)):
        for seed in (0, 0, 0, 1, 1, 0, 2):
            for dtype in (torch.float64, torch.float32):
                numbers = torch.tensor([rank, 1.0], dtype=dtype)
                with sums.only_pass():
                    beside = sums.beside(numbers, axes)
                    backward(model, seed)
                ranks = 4.0 if axes != (model.dp,) else 2.0
                assert beside.is_summed == (dtype == model.first.dtype and ranks == 4)
                assert beside.wait().tolist() == [total, ranks]
                assert beside.wait() is numbers
                check(model, seed)


FEW, MANY = True, False


def called_back(model: Mixed, *seeds: int) -> list[bool]:
    """Of a step for each seed, checked: whether fewer leaves called back than have gradients."""
    sums, found = model.mesh.sums, []
    for seed in seeds:
        with patch.object(sums, "receive", wraps=sums.receive) as receive, sums.only_pass():
            backward(model, seed)
        trained = sum(parameter.grad is not None for parameter in model.parameters())
        assert not sums.is_waiting
        check(model, seed)
        found.append(receive.call_count < trained)
    return found


CASES: tuple[Callable[[Mixed], None], ...] = (
    once, added_up, added_to_zeros, held_back, held_quietly, summed_early, frozen_later, hooked, checkpointed,
    broken_off, exchanged, in_steps, in_pieces,
)  # fmt: skip
LEVELS: dict[str, tuple[int, ...]] = {"dp_tp": (2, 2), "dp": (2, 1)}
CONFIGURATIONS: tuple[
    tuple[float, dict[str, tuple[int, ...]], tuple[str, ...], tuple[Callable[[Mixed], None], ...]], ...
] = (
    (1e-4, {}, ("dp_tp", "tp"), (once, held_back)),
    (25, {}, (), CASES),
    (2e-3, LEVELS, (), CASES),
    (2e-3, LEVELS, ("dp", "dp_tp"), (once,)),
)


def run_cases(path: Path) -> list[bool]:
    """Whether the memory of each model is free behind it."""
    memory = []
    for bucket_mb, levels, own, cases in CONFIGURATIONS:
        model = Mixed(path, bucket_mb, levels, own)
        assert bool(model.both.levels) == bool(levels)
        groups = [(axis.group, axis.of_sums.group) for axis in (model.dp, model.tp, model.both)]
        assert [one is not other for one, other in groups] == [name in own for name in ("dp", "tp", "dp_tp")]
        for case in cases:
            case(model)
        assert isinstance(model.first, DTensor)
        piece = model.first.to_local()
        memory.append(StorageWeakRef(piece.untyped_storage()))  # type: ignore[no-untyped-call]
        del model, piece
    gc.collect()
    return [bool(storage.expired()) for storage in memory]  # type: ignore[no-untyped-call]


def test_gradients_in_every_order_of_passes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 4 for name in "wv"}
    save_file({**values, "odd": torch.randn(7, generator=generator, dtype=torch.float64)}, tmp_path / "weights")
    for free in run_ranks(run_cases, 4, tmp_path / "weights"):
        assert free == [True] * len(CONFIGURATIONS)
