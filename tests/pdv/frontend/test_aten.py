"""What ATen operators become, against the module: values of two calls, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import pdv
from ir.errors import ModelError, UnsupportedOperatorsError
from pdv.check.reading import check_reading, copy_of
from pdv.check.reference import draw
from pdv.frontend import load_program
from tests.pdv.worlds import cluster


class Doing(nn.Module):
    """A linear map of x: [4, 6], and what ``what`` makes of that and of ids: [4, 6] below 6."""

    def __init__(self, what: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(6, 6), what

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.what(self.linear(x), ids)


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(6, (4, 6))
    ids[0, 0], ids[1, 2] = -100, 0
    return torch.randn(4, 6), ids


def shifted(y: Tensor, ids: Tensor) -> Tensor:
    new = ids.new_zeros(ids.shape)
    new[:, 1:] = ids[:, :-1].clone()
    new[:, 0] = 3
    return y * new.masked_fill(new == -100, 2)


def every_other(y: Tensor, ids: Tensor) -> list[Tensor]:
    """Pairs turned as rotary embeddings do, and pieces of other steps, some with an incomplete last one."""
    turned, angles = torch.empty_like(y), ids.cos()
    turned[:, 0::2] = y[:, 0::2] * angles[:, 1::2]
    turned[:, 1::2] = y[:, 1::2] + y[:, 0::2]
    made = [turned]
    for chosen in (slice(1, None, 3), slice(2, 5, 2), slice(0, None, 4), slice(3, 4, 2), slice(5, None, 5)):
        made.append(y.clone())
        made[-1][:, chosen] = angles[:, chosen]
    made.append(y.clone())
    made[-1][1::2] = angles[:2]
    return made


def at_known_places(y: Tensor, ids: Tensor) -> list[Tensor]:
    several, rows = y.reshape(2, 2, 6).repeat(1, 1, 1), torch.arange(2)
    made = [several.clone() for _ in range(4)]
    made[0][:, rows, rows] = 1.0
    made[1][:, rows, rows * 3] = y[:2, :2] * ids[0, 1]
    made[2][:, :, torch.tensor([0, 5, 4])] = y[:2, :3, None].transpose(1, 2)
    made[3][:, torch.tensor([True, False])] = y[2, :6]
    added = y.index_put((torch.tensor([3, 0]), torch.tensor([-1, 2])), y[1, :2], accumulate=True)
    return [*made, added]


def picked_by(*dims: int) -> Callable[[Tensor, Tensor], Tensor]:
    rows, columns = torch.arange(4)[:, None], torch.arange(3)[None, :]
    return lambda y, ids: y[(rows, columns)[dims[0]], (rows, columns)[dims[1]]] * ids[:1, :1]


SAID: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relations of integers": lambda y, ids: [
        y.masked_fill(f(ids, 2), 0.5) for f in (torch.eq, torch.ne, torch.lt, torch.ge)
    ],
    "every other element overwritten": every_other,
    "functions of integers": lambda y, ids: [
        y * f(ids.clamp(min=1))
        for f in (torch.cos, torch.sqrt, torch.log, torch.sigmoid, torch.erf, torch.expm1, torch.atan)
    ],
    "elements beyond the edges": lambda y, ids: (
        [F.pad(y.reshape(2, 2, 2, 3), (2, 1, 1, 0), mode) for mode in ("reflect", "replicate", "circular")]
        + [F.pad(y[None], (0, 4), "reflect"), F.pad(y[None], (3, 0), "circular")]
    ),
    "windows": lambda y, ids: [y.unfold(1, 3, 1), y.unfold(0, 2, 2) * 2, y.unfold(-1, 4, 2)],
    "elements at known places": at_known_places,
    "relations of tensors": lambda y, ids: torch.where(ids > ids[:, :1], y, -y),
    "relations of floats": lambda y, ids: torch.where(y > y.mean(), y, 0.1 * y) + (y <= 0.3) * ids,
    "masks": lambda y, ids: y * ((ids > 1) & (ids < 4) | ~(ids != 0) ^ (ids == 5)),
    "counts name rows": lambda y, ids: y.gather(1, (ids > 9).sum(1, keepdim=True) + 2) * (ids > 0).sum(),
    "truth values": lambda y, ids: y * torch.logical_and(ids, ids > 1) + (ids > 0).sum() + ~torch.logical_not(ids),
    "floats as truth values": lambda y, ids: y * ids.float().bool() + y.relu().bool(),
    "clamp": lambda y, ids: y.clamp(-0.1, 0.2) + y.clamp(min=0.0) + ids.clamp(0, 3) + ids.clamp(max=2) + F.relu6(y),
    "maximum": lambda y, ids: torch.maximum(y, 2 * y.flip(0)) + torch.minimum(ids, ids.flip(1)),
    "pad": lambda y, ids: (F.pad(y, (0, 2, 1, 0), value=0.5), F.pad(ids, (0, 1), value=-100)[:, 1:], F.pad(y, (-1, 1))),
    "overwritten": shifted,
    "cumsum": lambda y, ids: y.cumsum(1) + ids.cumsum(0) + (ids > 1).cumsum(-1),
    "gather": lambda y, ids: y.gather(1, ids.clamp(0, 5)),
    "one of each row": lambda y, ids: y.gather(1, ids[:, 1:2].clamp(0, 5)),
    "gather of integers": lambda y, ids: y * ids.gather(0, ids[:2].clamp(0, 3)).sum(0),
    "an index over rows and columns": picked_by(0, 1),
    "an index over columns and rows": picked_by(1, 0),
    "an index by ids": lambda y, ids: y[ids.clamp(-3, 3), ids.clamp(0, 5)],
    "an index of rank two": lambda y, ids: y[ids.clamp(0, 3)],
    "cross entropy": lambda y, ids: F.cross_entropy(y, ids[:, 0]),
    "cross entropy, a sum of some": lambda y, ids: F.cross_entropy(y, ids[:, 2], ignore_index=0, reduction="sum"),
    "cross entropy of each": lambda y, ids: F.cross_entropy(y, ids[:, 0], reduction="none", label_smoothing=0.1),
    "cross entropy over points": lambda y, ids: F.cross_entropy(y.view(2, 6, 2), ids[:2, :2], label_smoothing=0.2),
    "mean squares": lambda y, ids: F.mse_loss(y, ids.float()) + F.mse_loss(y, 2 * y, reduction="sum"),
    "group norm": lambda y, ids: F.group_norm(y.view(2, 4, 3), 2, y[0, :4], y[1, :4]) * ids.max(),
    "largest": lambda y, ids: y.amax(1) + y.amax() + y.amax((0, 1), keepdim=True),
    "turned": lambda y, ids: torch.roll(y, (1, -2), (0, 1)) + torch.roll(y, 5) + ids.flip((0, 1)),
    "softplus": lambda y, ids: F.softplus(y) + F.softplus(y, beta=2.0),
    "conv1d": lambda y, ids: F.conv1d(y.view(2, 2, 6), y[:, :4].reshape(4, 2, 2), y[0, :4], padding=1, stride=2),
    "einsum": lambda y, ids: torch.einsum("ij,kj,ij->ik", y, y, ids.float()),
    "integers and fractions": lambda y, ids: (ids * 0.5 + ids / 2 + ids.square()) * y,
    "parts of size zero": lambda y, ids: torch.cat([y[:, 6:] * 2, y, y[:, :0]], 1) + ids,
    "transposed convolution": lambda y, ids: F.conv_transpose2d(
        y.reshape(1, 4, 2, 3), torch.arange(24.0).reshape(4, 1, 2, 3) / 24, torch.ones(1), stride=(2, 3)
    ),
    "decomposed": lambda y, ids: (
        F.smooth_l1_loss(y, 2 * y) + F.leaky_relu(y).sum() + F.elu(y).sum() + F.hardswish(y).sum()
    ),
    "binary losses": lambda y, ids: F.binary_cross_entropy_with_logits(y, (ids > 2).float()),
}


@pytest.mark.parametrize("name", SAID)
def test_the_reading_is_the_module(name: str) -> None:
    module, inputs = Doing(SAID[name]), given()
    program = load_program(module, inputs)
    assert "are the same" in check_reading(program.graph, copy_of(module, inputs, train=True), train=True)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_unrolled(kind: type[nn.RNNBase]) -> None:
    module, inputs = Recurrent(kind), (torch.randn(4, 3, 3),)
    program = load_program(module, inputs)
    assert "are the same" in check_reading(program.graph, copy_of(module, inputs, train=True), train=True)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (lambda y, ids: y[ids > 2].cumsum(0), "depends on values"),
        (
            lambda y, ids: y.repeat_interleave(torch.tensor([0, 2, 1, 3]), 0).sum(0),
            "repeat_interleave.* at .*depends on values",
        ),
        (lambda y, ids: y.repeat_interleave(ids[0], 1), "repeat_interleave.* at .*depends on values"),
        (lambda y, ids: y.to(torch.complex64).log().abs(), "complex numbers"),
    ],
)
def test_what_is_not_understood_is_refused(what: Any, reason: str) -> None:
    with pytest.raises((UnsupportedOperatorsError, ModelError), match=reason):
        load_program(Doing(what), given())


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (lambda y, ids: y * (ids & 3), "bits of i64"),
        (lambda y, ids: y.index_put((torch.tensor([0, 0]),), y[:2]), "occur twice"),
        (lambda y, ids: F.cross_entropy(y, ids[:, 0], weight=torch.ones(6)), "with weights"),
    ],
)
def test_what_has_no_declaration_is_run_as_it_is(what: Any, reason: str) -> None:
    module, inputs = Doing(what), given()
    program = load_program(module, inputs)
    assert any(reason in text for text in program.opaque)
    assert "are the same" in check_reading(program.graph, copy_of(module, inputs, train=True), train=True)


class Labelled(nn.Module):
    """Ids and a mask of padding to logits and the loss of labels, as language models give them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        hidden = mask[torch.arange(4)[:, None, None], torch.arange(6)[None, None, :]].bool()
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=hidden)
        logits = self.head(x)
        return {
            "loss": F.cross_entropy(logits.view(-1, 12), F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)),
            "logits": logits,
        }


def test_a_model_with_its_mask_and_labels_is_cut_by_rows() -> None:
    labels = torch.randint(12, (4, 6))
    labels[0, 3:] = -100
    inputs = {"ids": torch.randint(12, (4, 6)), "mask": torch.ones(4, 6, dtype=torch.long), "labels": labels}
    plan = pdv.optimize(Labelled(), inputs, cluster=cluster(2), mesh={"dp": 2})
    assert "was run on 2 simulated ranks" in plan.document["run"]["statement"]


def test_no_row_of_a_mask_is_drawn_that_hides_all() -> None:
    """torch's kernel gives other gradients than products and a softmax do where an additive mask hides a whole row."""
    graph = load_program(Doing(lambda y, ids: y.masked_fill(ids == 0, 0.0)), given()).graph
    pair: Any = SimpleNamespace(source=graph, ranges={}, stored={})
    assert all(draw(pair, seed).inputs["ids"][..., 0].all() for seed in range(20))


def test_rows_named_by_sums_of_integers_are_proved() -> None:
    """A shifted sequence begins with its last token, found by a count (mBART)."""

    def last_token(y: Tensor, ids: Tensor) -> Tensor:
        return y + F.embedding(ids.gather(1, (ids >= 0).sum(1, keepdim=True) - 1), torch.eye(6))

    plan = pdv.optimize(Doing(last_token), (torch.randn(4, 6), torch.randint(6, (4, 6))), cluster=cluster(2))
    assert plan.document["proof"]["statement"].startswith("equal to its source")
