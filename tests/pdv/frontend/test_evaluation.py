"""What a module draws in evaluation, its program draws there; what it draws in training alone, there alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn import functional as F  # noqa: N812

import pdv
from pdv.config import Mode
from pdv.frontend import load_program
from pdv.frontend.torch.draws import AS_DROPOUT
from pdv.plan.package import import_package
from tests.pdv.frontend.test_onnx import node, save
from tests.pdv.worlds import cluster


class Dropping(nn.Module):
    """Of ones: what is kept shows."""

    def __init__(self, drop: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(6, 6), drop

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, 4, 6]"""
        return self.drop(self, torch.ones_like(x)) + 0 * self.net(x)  # type: ignore[no-any-return]


class Stubborn(nn.Dropout):
    """Monte-Carlo dropout, as it is written most."""

    def train(self, mode: bool = True) -> Stubborn:
        del mode
        return super().train(True)


class Both(nn.Module):
    """Some of it in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        always = F.dropout(torch.ones_like(x), 0.5, True)
        of_training = F.dropout(torch.ones_like(x), 0.5, self.training)
        return always * of_training + 0 * self.net(x)  # type: ignore[no-any-return]


def _built(module: nn.Module, path: Path, **options: Any) -> Any:
    pdv.optimize(module, torch.randn(8, 4, 6), cluster=cluster(2), **options).save(str(path))
    return import_package(path).build(device="cpu")


def _values(x: Tensor) -> list[float]:
    return sorted({round(value, 3) for value in x.flatten().tolist()})


OF_TRAINING: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda m, x: F.dropout(x, 0.5, m.training),
    "1d": lambda m, x: F.dropout1d(x, 0.5, m.training),
    "2d": lambda m, x: F.dropout2d(x[..., None], 0.5, m.training)[..., 0],
    "3d": lambda m, x: F.dropout3d(x[..., None, None], 0.5, m.training)[..., 0, 0],
    "alpha": lambda m, x: F.alpha_dropout(x, 0.5, m.training),
    "feature-alpha": lambda m, x: F.feature_alpha_dropout(x, 0.5, m.training),
    "beside-noise": lambda m, x: F.dropout1d(x, 0.5, m.training) + 0 * torch.randn_like(x),
}


@pytest.mark.parametrize("kind", OF_TRAINING)
def test_what_is_dropped_in_training_alone_is_whole_in_evaluation(kind: str, tmp_path: Path) -> None:
    module = Dropping(OF_TRAINING[kind])
    model = _built(module, tmp_path / f"of_training_{kind.replace('-', '_')}")
    x = torch.randn(8, 4, 6)
    assert _values(model(x)) == _values(module(x))
    assert len(_values(model(x))) == 2
    assert _values(model.eval()(x)) == _values(module.eval()(x)) == [1.0]


@pytest.mark.parametrize("kind", ["1d", "feature-alpha"])
def test_channels_are_dropped_whole(kind: str, tmp_path: Path) -> None:
    found = _built(Dropping(OF_TRAINING[kind]), tmp_path / "channels")(torch.randn(8, 4, 6))
    assert torch.equal(found, found[..., :1].expand_as(found))


@pytest.mark.parametrize("of", AS_DROPOUT)
def test_operators_by_plain_dropout_have_torchs_distribution(of: Any) -> None:
    x, made = torch.randn(50, 40, 30), AS_DROPOUT[of]
    for found in (made(x, 0.3, True), of(x, 0.3, True)):
        other = of(x, 0.3, True)
        assert abs(float(found.mean() - other.mean())) < 0.05
        assert abs(float(found.std() - other.std())) < 0.05
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mine = made(torch.ones(200, 200), 0.3, True)
        its = of(torch.ones(200, 200), 0.3, True)
    assert _values(mine) == _values(its)
    assert made(x, 0.3, False) is x


ALWAYS: dict[str, Callable[[], nn.Module]] = {
    "said": lambda: Dropping(lambda m, x: F.dropout(x, 0.5, True)),
    "channels": lambda: Dropping(lambda m, x: F.dropout1d(x, 0.5, True)),
    "its-own-mode": lambda: nn.Sequential(nn.Linear(6, 6), Stubborn(0.5)),
    "attention": lambda: Dropping(lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
    "beside-others": Both,
}


@pytest.mark.parametrize("kind", ALWAYS)
def test_what_is_dropped_in_evaluation_too_stays(kind: str, tmp_path: Path) -> None:
    module = ALWAYS[kind]()
    model, x = _built(module, tmp_path / f"always_{kind.replace('-', '_')}"), torch.randn(8, 4, 6)
    for both in (module, model):
        both.eval()
    assert not torch.equal(module(x), module(x))
    assert not torch.equal(model(x), model(x))
    if kind in ("said", "channels", "beside-others"):
        assert _values(model(x)) == _values(module(x)) == [0.0, 2.0]


def test_a_module_in_evaluation_of_which_a_part_drops_keeps_it(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).eval()
    module[1].train()
    model, x = _built(module, tmp_path / "part", mode="infer").eval(), torch.randn(8, 4, 6)
    assert not torch.equal(model(x), model(x))


def test_what_drops_another_share_in_evaluation_is_refused_there(tmp_path: Path) -> None:
    model = _built(Dropping(lambda m, x: F.dropout(x, 0.5 if m.training else 0.25, True)), tmp_path / "share")
    model(torch.randn(8, 4, 6))
    with pytest.raises(RuntimeError, match="drawn-in-training"):
        model.eval()(torch.randn(8, 4, 6))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_dropout_between_them(kind: Any) -> None:
    module = kind(6, 6, 3, dropout=0.5, bidirectional=True)
    shares = [node.attr("p") for node in load_program(module, torch.randn(4, 8, 6)).graph.nodes if node.op.draws]
    assert shares == [0.5, 0.5]
    assert not load_program(module.eval(), torch.randn(4, 8, 6)).graph.draws


def test_noise_of_an_exported_program_may_be_of_training_alone(tmp_path: Path) -> None:
    x = torch.randn(8, 4, 6)
    program = torch.export.export(Dropping(lambda m, x: x + torch.randn_like(x)), (x,))
    plan = pdv.optimize(program, cluster=cluster(2))
    plan.save(str(tmp_path / "exported"))
    model = import_package(tmp_path / "exported").build(device="cpu")
    with pytest.raises(RuntimeError, match="drawn-in-training"):
        model.eval()(x)


def test_asking_leaves_buffers_as_they_are() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)  # type: ignore[operator]
            if not self.training and bool((x > 9).any()):  # which cannot be said without values
                return x
            return x + self.count + torch.randn_like(x)  # type: ignore[operator]

    module = Counting()
    load_program(module, torch.randn(4, 6))
    assert float(module.count) == 0  # type: ignore[arg-type]


class Orthogonal(nn.Module):
    """Torch is asked whether the first dim of its matrix may be longer, which it may not."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.matrix_exp(self.matrix)  # type: ignore[no-any-return]


def test_nothing_is_logged_of_a_model_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(fake_tensor.log, "handle", said.append)
    monkeypatch.setattr(
        fake_tensor.log, "isEnabledFor", lambda level: level >= logging.ERROR and not fake_tensor.log.disabled
    )
    assert load_program(Orthogonal(), torch.randn(8, 4)).opaque
    assert not said


def test_dropout_of_a_file_stays_on_where_it_is_planned_as_it_is(tmp_path: Path) -> None:
    stored = {"w": np.eye(8, dtype="f"), "ratio": np.float32(0.25), "training": np.array(True)}
    nodes = [node("MatMul", ["x", "w"], "h"), node("Dropout", ["h", "ratio", "training"])]
    path, x = save(tmp_path / "m.onnx", nodes, {"x": [64, 8]}, stored), torch.ones(64, 8)
    trained, inferred = (pdv.optimize(path, cluster=cluster(2), mode=mode) for mode in ("train", "infer"))
    assert "dropout is taken for that of training alone" in trained.document["reading"]
    assert torch.equal(trained.build("cpu").eval()(x), x)
    for found in (inferred.build("cpu").eval()(x).detach(), inferred.build("cpu").train()(x).detach()):
        assert 0.1 < (found == 0).float().mean() < 0.4
        assert found.max() == pytest.approx(1 / 0.75)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_dropout_of_an_exported_program(mode: Mode) -> None:
    x = torch.ones(64, 8)
    exported = torch.export.export(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25)), (x,))
    model = pdv.optimize(exported, cluster=cluster(2), mode=mode).build("cpu")
    dropped = (model.eval()(x) == 0).float().mean()
    assert dropped == 0 if mode == "train" else 0.1 < dropped < 0.4
