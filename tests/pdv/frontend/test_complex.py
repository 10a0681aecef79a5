"""Complex numbers inside a module: rotary embeddings, Fourier transforms and their kind, as real tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ir.errors import ModelError, UnsupportedOperatorsError
from pdv.check.reading import check_reading, copy_of
from pdv.frontend import load_program

Function = Callable[["Between", Tensor], Tensor]


class Between(nn.Module):
    """x: [3, 4, 6] -> a linear layer, a function by way of complex numbers, a linear layer."""

    freqs: Tensor

    def __init__(self, inner: Function) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), inner
        self.weight = nn.Parameter(torch.randn(4, 4, 2))
        angles = torch.outer(torch.arange(8.0), torch.rand(3))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self, self.first(x))


def rotary(m: Between, y: Tensor) -> Tensor:
    """As Llama's reference has it."""
    pairs = torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * m.freqs[0 : y.shape[1]].view(1, 4, 3)).flatten(2)


def spectral(m: Between, y: Tensor) -> Tensor:
    """A layer of a Fourier neural operator: known frequencies are weighted."""
    found = torch.fft.rfft(y, dim=2, norm="ortho") * torch.view_as_complex(m.weight)
    return torch.fft.irfft(found, n=6, dim=2, norm="ortho")


def _put(m: Between, y: Tensor) -> Tensor:
    """What is real, written over what is complex."""
    found = torch.fft.fft(y)
    found[:] = y[:, :1]
    return found.real


FUNCTIONS: dict[str, Function] = {
    "rotary": rotary,
    "spectral": spectral,
    "mixed": lambda m, y: torch.fft.fftn(y, dim=(1, 2)).real,
    "there and back": lambda m, y: torch.fft.ifft(torch.fft.fft(y, dim=1) * 2.0, dim=1).imag + y,
    "two dims": lambda m, y: torch.fft.irfft2(torch.fft.rfft2(y) * torch.fft.rfft2(y), s=(4, 6)),
    "odd": lambda m, y: torch.fft.irfft(torch.fft.rfft(y[..., :5], norm="forward"), n=5, norm="forward"),
    "polar": lambda m, y: (torch.polar(y.abs(), y) + torch.complex(y, 2 * y)).conj().transpose(0, 2)[1:].abs(),
    "numbers": lambda m, y: torch.view_as_real(
        (2 - 3j) / (((1 + 2j) * y + 1j * (y - 1j) - 3.0) / (0.5j - 2) - y * 2j + 3)
        - torch.view_as_complex(m.weight)[0, 0]
    ).flatten(2),
    "quotients": lambda m, y: torch.view_as_real(
        y[:, :, :4] / (torch.view_as_complex(m.weight) + 4) + torch.fft.fft(y)[:, :, :4] / (1 - 1j * y.exp()[:, :, :4])
    ).sum(-1),
    "exponentials": lambda m, y: (torch.exp(-y + 1j * y) - torch.add(y.exp(), 1j * y, alpha=2j)).imag,
    "put": _put,
    "padded": lambda m, y: torch.fft.irfft(nn.functional.pad(torch.fft.rfft(y)[..., :2], (1, 1, 0, 2)), n=6),
    "shifted": lambda m, y: (
        torch.fft.ifft2(torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fft2(y))[:, 1:3], dim=-1)).real
        + torch.roll(torch.fft.fft(y), 5)[:, :2].imag
    ),
    "one of them": lambda m, y: torch.view_as_complex(y.view(3, 4, 3, 2)).unsqueeze(0)[0, 1].mul(m.freqs[:4]).real,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_by_way_of_complex_numbers(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = Between(FUNCTIONS[name]), (torch.randn(3, 4, 6),)
    program = load_program(module, inputs)
    assert not program.opaque
    assert "are the same" in check_reading(program.graph, copy_of(module, inputs, train=True), train=True)


def test_what_has_no_real_form_here_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorsError, match="complex"):
        load_program(Between(lambda m, y: torch.fft.fft(y).log().real), (torch.randn(3, 4, 6),))
    with pytest.raises(ModelError, match="complex"):
        load_program(Between(lambda m, y: torch.fft.fft(y)), (torch.randn(3, 4, 6),))
