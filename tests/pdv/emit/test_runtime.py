"""Meshes of one process, and stored weights read by slice through views."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pdv.emit.templates.parallel import Axis
from pdv.emit.templates.runtime import Mesh, Weights, join, local, make_mesh, train_step

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
CPU = torch.device("cpu")
STORED = torch.arange(4 * 6 * 8, dtype=torch.float32).reshape(4, 6, 8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "weights.safetensors"
    ids, flag = torch.arange(5), torch.tensor(True)
    save_file(
        {"w": STORED, "ids": ids, "scalar": torch.tensor(2.5), "flag": flag, 'a "b"\n.c': STORED[0].clone()}, path
    )
    return path


@pytest.fixture(scope="module")
def weights(path: Path) -> Weights:
    return Weights(path)


@given(st.permutations(range(3)), st.integers(0, 2), st.integers(0, 1), st.integers(0, 1), st.integers(0, 2))
@settings(max_examples=50)
def test_views_and_cuts_read_what_the_tensor_operations_give(
    weights: Weights, perm: list[int], narrowed: int, outer: int, inner: int, dim: int
) -> None:
    stored, expected = weights["w"].permute(*perm), STORED.permute(*perm)
    half = expected.size(narrowed) // 2
    stored, expected = stored.narrow(narrowed, half, half), expected.narrow(narrowed, half, half)
    mesh = Mesh((Axis("dp", 1, 0), Axis("tp", 2, inner)), CPU)
    if expected.size(dim) % 4 == 0:
        mesh = Mesh((Axis("dp", 2, outer), Axis("tp", 2, inner)), CPU)
        expected = expected.chunk(2, dim)[outer]
    if expected.size(dim) % 2:
        return
    piece = mesh.tensor(stored, {"tp": dim, "dp": dim})
    assert torch.equal(piece, expected.chunk(2, dim)[inner])
    assert piece.is_contiguous()
    assert piece.untyped_storage().nbytes() == piece.numel() * 4  # its own memory, not a view of the file


def test_scalars_dtypes_and_hostile_names(weights: Weights, path: Path) -> None:
    assert weights["scalar"].read(CPU).item() == 2.5
    half = Weights(path, torch.bfloat16)
    assert half["scalar"].read(CPU).dtype == torch.bfloat16
    assert half["ids"].read(CPU).dtype == torch.int64
    assert weights["flag"].read(CPU).item() is True
    assert torch.equal(weights['a "b"\n.c'].read(CPU), STORED[0])


def test_one_process_gets_every_axis_with_size_one(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    mesh = make_mesh({"dp": 2, "tp": 4}, "cpu")
    assert [(axis.name, axis.size) for axis in mesh.axes] == [("dp", 1), ("tp", 1)]
    parameter = mesh.parameter(weights["w"], {"tp": 0})
    assert type(parameter) is torch.nn.Parameter
    assert local(parameter) is parameter
    assert torch.equal(parameter, STORED)


def test_a_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"wrong-world-size: 3 processes for the mesh dp=2 x tp=4. It runs on 8"):
        make_mesh({"dp": 2, "tp": 4}, "cpu")


@pytest.mark.parametrize("left", [["WORLD_SIZE"], ["RANK"], ["RANK", "WORLD_SIZE"], [*LAUNCHED][1:]])
def test_half_an_environment_is_refused(left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value) if name in left else monkeypatch.delenv(name, raising=False)
    missing = next(name for name in LAUNCHED if name not in left)
    with pytest.raises(RuntimeError, match=f"half-launched: {left[0]}=.* in the environment, and no {missing}"):
        make_mesh({"dp": 3}, "cpu")


def test_a_process_group_that_is_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the environment, which who started the processes need not have set, or set for others."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(RuntimeError, match=r"wrong-world-size: 3 processes for the mesh dp=2"):
        make_mesh({"dp": 2}, "cpu")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_on_one_process_is_the_plain_step(reduction: str) -> None:
    model = torch.nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    loss_fn = torch.nn.MSELoss(reduction=reduction)
    expected = loss_fn(model(x), y)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    loss = train_step(model, x, y, loss_fn, [Axis("dp")], reduction=reduction)  # type: ignore[arg-type]
    assert torch.equal(loss, expected.detach())
    assert not loss.requires_grad
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, grad)


def test_a_reshaped_view_reads_and_writes_the_stored_layout(weights: Weights) -> None:
    stored = weights["w"].permute(2, 0, 1).reshape(8, 24).narrow(0, 2, 4)
    assert torch.equal(stored.read(CPU), STORED.permute(2, 0, 1).reshape(8, 24)[2:6])
    wholes: dict[str, torch.Tensor] = {}
    weights["w"].permute(2, 0, 1).reshape(8, 24).write(STORED.permute(2, 0, 1).reshape(8, 24), wholes, rest=False)
    assert torch.equal(wholes["w"], STORED)


def test_joined_views_are_read_and_cut_as_one_and_written_where_they_belong(weights: Weights) -> None:
    """cat(upper half, lower half) is cut across the seam."""
    stored = join(1, weights["w"].narrow(1, 3, 3), weights["w"].narrow(1, 0, 3))
    expected = torch.cat([STORED[:, 3:], STORED[:, :3]], 1)
    assert torch.equal(stored.read(CPU), expected)
    mesh = Mesh((Axis("tp", 3, 1),), CPU)
    assert torch.equal(mesh.tensor(stored, {"tp": 1}), expected[:, 2:4])
    assert torch.equal(mesh.tensor(stored.permute(1, 0, 2), {"tp": 0}), expected[:, 2:4].permute(1, 0, 2))
    wholes: dict[str, torch.Tensor] = {}
    stored.permute(1, 0, 2).write(expected.permute(1, 0, 2), wholes, rest=False)
    assert torch.equal(wholes["w"], STORED)
