"""Text of emitted decoders, against the module's own; weights from checkpoints, by names that may have a prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pdv
from ir.errors import ModelError, UsageError, WeightsError
from pdv.loops.checkpoint import load_checkpoint, save_checkpoint
from pdv.loops.generate import generate
from pdv.loops.pretrained import load_pretrained
from pdv.loops.reshard import layout_of
from pdv.plan.package import import_package
from tests.pdv.miniatures import Gpt, ids, settled
from tests.pdv.worlds import cluster

LENGTH = 8
PROMPTS = torch.tensor([[5, 17, 3], [40, 2, 11], [7, 7, 7]])


@pytest.fixture(scope="module")
def source() -> Any:
    """Weights that the package was not made of."""
    torch.manual_seed(1)
    module = settled(Gpt(1)).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.fixture(scope="module")
def model() -> Any:
    return pdv.optimize(settled(Gpt(1)), (ids(4, LENGTH),), cluster=cluster(2), pins={"mesh": {"dp": 2}}).build()


@pytest.fixture
def trained(model: Any, source: Any, tmp_path: Path) -> Any:
    save_file(stored(source), tmp_path / "weights.safetensors")
    load_pretrained(tmp_path / "weights.safetensors", model)
    return model


def stored(source: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Tied weights once, as Hugging Face stores them."""
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    return {f"{prefix}{name}": tensor for name, tensor in state.items() if name != "head.weight"}


@torch.no_grad()
def follow(source: nn.Module, row: Tensor, count: int, end: int = -1) -> Tensor:
    """The likeliest tokens, by the module itself."""
    for _ in range(count):
        padded = torch.cat([row, torch.zeros(LENGTH - len(row), dtype=torch.int64)])
        row = torch.cat([row, source(padded[None])[0, len(row) - 1].argmax().reshape(1)])
        if int(row[-1]) == end:
            break
    return row


def test_greedy_text_is_that_of_the_module(trained: Any, source: Any) -> None:
    for rows in (PROMPTS, PROMPTS[:1]):
        wanted = torch.stack([follow(source, row, 5) for row in rows])
        assert torch.equal(generate(trained, rows, 5), wanted)


def test_rows_of_several_lengths_end_where_they_end(trained: Any, source: Any) -> None:
    rows = [PROMPTS[0], PROMPTS[1, :1], PROMPTS[2, :2]]
    for row, given in zip(generate(trained, rows, 4), rows, strict=True):
        wanted = follow(source, given, 4)
        assert torch.equal(row[: len(wanted)], wanted)
        assert not row[len(wanted) :].any()
    end = int(follow(source, PROMPTS[0], 2)[-1])
    for row, given in zip(generate(trained, PROMPTS, 5, eos=end, pad=1), PROMPTS, strict=True):
        wanted = follow(source, given, 5, end)
        assert torch.equal(row[: len(wanted)], wanted)
        assert (row[len(wanted) :] == 1).all()


def test_drawn_text_is_of_the_likeliest(trained: Any, source: Any) -> None:
    greedy = torch.stack([follow(source, row, 5) for row in PROMPTS])
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert torch.equal(generate(trained, PROMPTS, 5, sample=True, **options), greedy)
    drawn = [
        generate(trained, PROMPTS, 5, sample=True, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": LENGTH}, {"max_new_tokens": 0}, {"max_new_tokens": 1, "temperature": 0.0}]
)
def test_what_gives_no_text_is_refused(wrong: Any, trained: Any) -> None:
    with pytest.raises(UsageError):
        generate(trained, PROMPTS, **wrong)
    with pytest.raises(UsageError, match="without tokens"):
        generate(trained, [], 1)


class Both(nn.Module):
    """Sees what is ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        return self.head(x + x.mean(1, keepdim=True))


def test_a_program_that_sees_what_is_ahead_is_refused() -> None:
    model = pdv.optimize(Both(), (torch.randint(0, 8, (2, 6)),), cluster=cluster(2), mode="infer").build()
    with pytest.raises(UsageError, match="what stands behind"):
        generate(model, torch.tensor([[1, 2]]), 2)


# ---- Checkpoints ----


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_names_may_have_a_prefix(prefix: str, model: Any, source: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: x + len(prefix) for name, x in stored(source, prefix).items()}, path)
    load_pretrained(tmp_path, model)
    found = model.full_state_dict()
    assert all(torch.equal(found[name], tensor + len(prefix)) for name, tensor in source.state_dict().items())
    model.save_safetensors(tmp_path / "out")
    load_pretrained(tmp_path / "out", model)


class Tied(nn.Module):
    """One table in two places, and a part that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.spare = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.Linear(2, 2)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.embed(ids).tanh())


def test_a_weight_is_known_by_all_its_names_in_both_modes(tmp_path: Path) -> None:
    inputs, path = (torch.zeros(2, 3, dtype=torch.int64),), tmp_path / "model.safetensors"
    trained, inferred = (
        pdv.optimize(Tied(), inputs, cluster=cluster(2), mode=mode).build() for mode in ("train", "infer")
    )
    for model, other in ((trained, inferred), (inferred, trained)):
        for name in ("embed.weight", "head.weight"):
            for load in (
                lambda _, taker=model: load_pretrained(path, taker),
                lambda _, taker=model: taker.load_safetensors(path),
                lambda state, taker=model: taker.load_full_state_dict(state),
            ):
                table = torch.randn(8, 4)
                save_file({name: table}, path)
                load({name: table})
                found = model.full_state_dict()
                assert found.keys() == Tied().state_dict().keys()
                assert torch.equal(found["embed.weight"], table)
                assert torch.equal(found["head.weight"], table)
        save_checkpoint(tmp_path / "saved", model, overwrite=True)
        load_checkpoint(tmp_path / "saved", other)
        assert torch.equal(other.full_state_dict()["head.weight"], model.full_state_dict()["head.weight"])


class Norms(nn.Module):
    """For inference its convolution has the norm in it, and its positions are rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.places = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.conv(x))
        return x.mT + self.places(torch.arange(x.size(2)))


def test_what_is_computed_of_weights_is_computed_of_others(tmp_path: Path) -> None:
    inputs = (torch.randn(2, 3, 8),)
    plan = pdv.optimize(Norms().eval(), inputs, cluster=cluster(2), mode="infer", pins={"mesh": {"dp": 2}})
    plan_folder, path = plan.save(tmp_path / "norms_pdv"), tmp_path / "model.safetensors"
    model = import_package(plan_folder).build()
    for save in (model.full_state_dict, lambda: model.save_safetensors(tmp_path / "out")):
        with pytest.raises(ValueError, match=r"\.folded was computed"):
            save()
    for keep in (lambda: save_checkpoint(tmp_path / "out", model), lambda: layout_of(plan_folder)):
        with pytest.raises(UsageError, match=r"\.folded was computed"):
            keep()
    assert not (tmp_path / "out").exists()
    source = Norms().eval()
    for tensor in source.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    save_file(source.state_dict(), path)
    load_pretrained(path, model)
    torch.testing.assert_close(model(*inputs), source(*inputs))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, wrong in (("conv.weight", torch.ones(4, 9)), ("norm.weight", torch.ones(1)), ("places.weight", None)):
        state = {**source.state_dict(), name: wrong}
        save_file({key: tensor for key, tensor in state.items() if tensor is not None}, path)
        with pytest.raises(WeightsError, match=name):
            load_pretrained(path, model)
        with pytest.raises(ValueError, match="load_pretrained"):
            model.load_safetensors(path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(WeightsError, match="is no directory"):
        load_pretrained(path, plan.build())


class Named(nn.Module):
    """Its parameters are called as this package calls what it stores beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.constants, self.kept = nn.Module(), nn.Module(), nn.Linear(4, 4)
        self.norms.folded, self.constants.constant = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Any:
        x = torch.sigmoid(self.kept(x)) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return torch.sigmoid(x * self.norms.folded) + self.constants.constant


def test_tensors_of_the_source_may_have_any_name(tmp_path: Path) -> None:
    source, x = Named(), torch.randn(2, 4)
    plan = pdv.optimize(source, (x,), cluster=cluster(2), mode="infer", pins={"mesh": {"dp": 2}})
    model = import_package(plan.save(tmp_path / "named_pdv")).build()
    torch.testing.assert_close(model(x), source(x))
    model.save_safetensors(tmp_path / "out")
    save_checkpoint(tmp_path / "checkpoint", model)
    other = Named()
    load_pretrained(tmp_path / "out", model)
    for state in (model.full_state_dict(), load_file(tmp_path / "out" / "model.safetensors")):
        other.load_state_dict(state)
        torch.testing.assert_close(other(x), source(x))


def test_a_tensor_that_nothing_reads_is_not_overwritten_without_a_word() -> None:
    class Unread(Named):
        def forward(self, x: Tensor) -> Any:
            return self.kept(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])

    with pytest.raises(ModelError, match=r"constants\.constant.*that nothing reads"):
        pdv.optimize(Unread(), (torch.randn(2, 4),), cluster=cluster(2)).build()


def test_what_does_not_fit_leaves_all_as_it_was(trained: Any, source: Any, tmp_path: Path) -> None:
    whole, path = stored(source), tmp_path / "other.safetensors"
    before = {name: tensor.clone() for name, tensor in trained.full_state_dict().items()}
    some = next(name for name in whole if name.endswith("bias"))
    wrong = {
        f"has no {some}": {name: tensor for name, tensor in whole.items() if name != some},
        "of shape": {**whole, some: torch.zeros(3)},
        "is I8": {**whole, some: whole[some].to(torch.int8)},
    }
    for match, tensors in wrong.items():
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
        with pytest.raises(WeightsError, match=match):
            load_pretrained(path, trained)
    path.write_bytes(path.read_bytes()[:100])
    for bad in (path, tmp_path / "nowhere"):
        with pytest.raises(WeightsError, match=r"cannot be read|there is no"):
            load_pretrained(bad, trained)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.full_state_dict().items())
    save_file({name: tensor + 1 for name, tensor in whole.items() if name != some}, path)
    load_pretrained(path, trained, new=(some,))
    found = trained.full_state_dict()
    assert torch.equal(found[some], before[some])
    assert torch.equal(found["wte.weight"], before["wte.weight"] + 1)
