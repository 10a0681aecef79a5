"""Habits of modules that people write: closures over themselves, buffers bound anew, dataclasses, torch.func."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ir.errors import ModelError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program
from pdv.frontend.program import Program
from pdv.frontend.torch import module as traced

X = torch.arange(24.0).reshape(4, 6).sin()


def read(module: nn.Module, x: Any = X) -> Program:  # Any: example inputs
    """Its program, compared with it in outputs, gradients and state."""
    source = copy_of(module, x, train=True)
    program = load_program(module, x)
    assert check_reading(program.graph, source, train=True).endswith("are the same")
    return program


def trained(program: Program) -> set[str]:
    """Names of parameters that have gradients."""
    return {str(param.attr("name")) for param in program.graph.params if param.attr("trainable")}


class Adapted(nn.Module):
    """A frozen layer; what is trained is reached by a function alone that holds the module."""

    def __init__(self, attach: Callable[[Adapted], None]) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.up = nn.Linear(6, 6)
        self.apply_to: list[Any] = []
        attach(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for each in self.apply_to:
            y = each(y)
        return y


def by_hook(module: Adapted) -> None:
    module.base.register_forward_hook(lambda _, __, out: out + module.up(out))


def by_lambda(module: Adapted) -> None:
    module.apply_to.append(lambda y: y + module.up(y))


def by_partial_of_nested(module: Adapted) -> None:
    def inner(y: Tensor) -> Tensor:
        return module.up(y)

    def outer(scale: float, y: Tensor) -> Tensor:
        return y + scale * inner(y)

    module.apply_to.append(partial(outer, 0.5))


def by_method_in_closure(module: Adapted) -> None:
    run = module.up.forward
    module.apply_to.append(lambda y: y + run(y))


@pytest.mark.parametrize("attach", [by_hook, by_lambda, by_partial_of_nested, by_method_in_closure])
def test_what_functions_hold_of_a_module_is_trained(attach: Callable[[Adapted], None]) -> None:
    module = Adapted(attach)
    assert trained(read(module)) == {"up.weight", "up.bias"}
    assert all(p.grad is None for p in module.parameters()), "nothing was left in the module that was given"


def test_a_parameter_that_is_reached_by_a_name_of_the_script_is_refused() -> None:
    module = Adapted(lambda _: None)
    script: dict[str, Any] = {"module": module}
    exec("def add(y):\n    return y + module.up(y)", script)  # as a script defines it
    module.apply_to.append(script["add"])
    with pytest.raises(ModelError, match=r"reads its parameter up\.\w+ by another way"):
        load_program(module, X)


class Centre(nn.Module):
    """A running mean, bound anew; the one before is used, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        before = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.gain * (x - self.mean) + before.tanh() * x


@pytest.mark.parametrize("module", [Centre(), nn.Sequential(nn.Linear(6, 6), Centre(), Centre())])
def test_a_buffer_that_is_bound_anew_is_overwritten(module: nn.Module) -> None:
    program = read(module)
    assert {name.rsplit(".")[-1] for name, _ in program.graph.updates} == {"mean"}


def test_a_buffer_that_is_overwritten_and_never_read_is_kept() -> None:
    """A spectral norm's iteration makes the one vector of the other, and that one anew."""
    program = read(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh()))
    assert {name.rsplit(".")[-1] for name, _ in program.graph.updates} == {"_u", "_v"}


@dataclass
class Inner:
    """A part of an output."""

    logits: Tensor
    nothing: None = None


@dataclass
class Output:
    """What a model gives."""

    loss: Tensor | None
    inner: list[Inner]


class Packed(nn.Module):
    """Gives dataclasses in dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Output:
        y = self.fc(x)
        return Output(y.square().mean(), [Inner(y), Inner(-y)])


def test_dataclasses_are_taken_apart() -> None:
    assert [node.type.shape for _, node in read(Packed()).graph.outputs] == [(), (4, 3), (4, 3)]


class Mapped(nn.Module):
    """A function of one row, mapped over the batch; with its derivative if asked."""

    def __init__(self, *, derived: bool) -> None:
        super().__init__()
        self.net, self.derived = nn.Linear(6, 6), derived

    def forward(self, x: Tensor) -> Tensor:
        run = torch.func.jacrev(self.net) if self.derived else self.net
        return torch.func.vmap(run)(x)


def test_vmap_is_read_and_derivatives_are_refused_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert trained(read(Mapped(derived=False))) == {"net.weight", "net.bias"}
    with pytest.raises(ModelError, match=r"derivatives inside of forward.*test_habits\.py"):
        load_program(Mapped(derived=True), X)
    assert "def forward" not in capfd.readouterr().err


def test_lazy_layers_are_to_be_called_once() -> None:
    module = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ModelError, match=r"its first call makes: 0\.weight, 0\.bias.*Call it once"):
        load_program(module, X)
    module(X)
    assert trained(read(module)) == {"0.weight", "0.bias"}


class Frequencies(nn.Module):
    """Some frequencies multiplied, the others zero."""

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        weight = torch.randn(3, 3, 2, dtype=torch.cfloat)
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if real else weight)
        self.real = real

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight) if self.real else self.weight
        found = torch.fft.rfft(x.reshape(-1, 3, 8))
        out = torch.zeros_like(found)
        out[..., :2] = torch.einsum("bim,iom->bom", found[..., :2], weight)
        return torch.fft.irfft(torch.cat([out, found], 1), n=8)


def test_complex_products_are_read_and_complex_weights_refused() -> None:
    assert trained(read(Frequencies(real=True))) == {"weight"}
    with pytest.raises(ModelError, match=r"weight is complex.*view_as_complex"):
        load_program(Frequencies(real=False), X)


class Certain(nn.Module):
    """A likelihood of torch.distributions, which look at values unless told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return -torch.distributions.Normal(torch.zeros_like(y), torch.ones_like(y)).log_prob(y).mean()


def test_distributions_are_read() -> None:
    before = torch.distributions.Distribution._validate_args
    assert trained(read(Certain())) == {"fc.weight", "fc.bias"}
    assert torch.distributions.Distribution._validate_args == before


class Worded(nn.Module):
    """A part called like a word of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"class": nn.Linear(6, 3)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"class": self.heads["class"](x)}


def test_words_of_python_are_refused_in_a_sentence() -> None:
    with pytest.raises(ModelError, match=r"words of Python: heads\.class\.weight.*class_ for class"):
        load_program(Worded(), X)


class Buffered(nn.Module):
    """Adds a buffer that is called like an attribute of torch's class of programs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("code", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.get_buffer("code")


def test_a_buffer_called_like_an_attribute_of_torch_s_programs() -> None:
    with pytest.raises(ModelError, match=r"a program with code: .* attribute 'code' of its own.*codes for code"):
        load_program(Buffered(), torch.ones(2, 4))


class Padded(nn.Module):
    """Causal attention where rows begin with padding, so that some see nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unsqueeze(1) for y in self.qkv(x).chunk(3, -1))
        least = torch.finfo(x.dtype).min
        hidden = torch.full((4, 4), -torch.inf).triu(1) + (1.0 - mask[:, None, None].float()) * least
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, hidden.clamp(min=least))


def test_rows_that_attend_to_nothing_have_the_gradients_of_their_formula() -> None:
    """PyTorch's fused kernel for CPUs has others in backward than its forward would have."""
    read(Padded(), (torch.randn(2, 4, 6), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])))


class Noisy(nn.Module):
    """A parameter and an input of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return x + self.noise * noise


def test_an_input_is_told_from_a_parameter_of_its_name() -> None:
    program = read(Noisy(), (X, X.cos()))
    assert [node.attr("name") for node in program.graph.inputs] == ["x", "noise_input"]


class WithData(nn.Module):
    """Reads and writes by ``data``, as ``what`` does."""

    def __init__(self, what: Callable[[WithData, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self._what = nn.Linear(6, 6), what
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self._what(self, self.linear(x))


def moved_by_data(m: WithData, y: Tensor) -> Tensor:
    m.mean.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
    return y + m.mean


def bound_to_data(m: WithData, y: Tensor) -> Tensor:
    m.mean.data = 0.9 * m.mean + 0.1 * y.data.mean(0)
    return y + m.mean


def scaled_by_data(m: WithData, y: Tensor) -> Tensor:
    return y / (1 + y.data.square().sum()) * m.linear.weight.data.norm()


@pytest.mark.parametrize("what", [moved_by_data, bound_to_data, scaled_by_data])
def test_data_is_the_tensor_without_its_gradient(what: Callable[[WithData, Tensor], Tensor]) -> None:
    """Torch's own tracing takes what ``data`` gives for a constant without values, and decomposing it ends Python."""
    program = read(WithData(what))
    assert bool(program.graph.updates) is (what is not scaled_by_data)


def clipped(m: WithData, y: Tensor) -> Tensor:
    m.linear.weight.data.clamp_(-0.1, 0.1)
    return y


def test_a_parameter_that_is_overwritten_by_its_data_is_named() -> None:
    with pytest.raises(ModelError, match=r"overwrites the parameter 'linear.weight'.*behind optimizer.step\(\)"):
        load_program(WithData(clipped), X)


def test_what_torch_loses_sight_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what stands for ``data``: a constant without values is told before torch runs its kernels on it."""

    class Clipped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    monkeypatch.setattr(traced, "_GET_DATA", None)
    with pytest.raises(ModelError, match=r"loses sight of a tensor that is read at "):
        load_program(Clipped(6, 6), X)
    with pytest.raises(ModelError, match="loses sight"):
        load_program(torch.export.export(Clipped(6, 6), (X,), strict=True))


def test_parts_without_elements_write_nothing() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y, none = self.linear(x).clone(), torch.zeros(0, dtype=torch.int64)
            y[:, 6:] = x[:, 6:]
            y = y.index_add(0, none, x[:0]).scatter(0, none[:, None].expand(0, 6), x[:0])
            return y.index_copy(0, none, x[:0])

    read(Writing())
