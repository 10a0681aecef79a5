"""Convolutional networks as modules of plain torch: Inception-v3, ResNeXt, SqueezeNet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Kernel = tuple[int, int]
POINT, ROW, COLUMN = (1, 1), (1, 7), (7, 1)


class Conv(nn.Module):
    """Convolution, batch normalisation, and (unless ``active`` is False) ReLU: [n, ci, h, w] -> [n, co, h', w']."""

    def __init__(
        self,
        ci: int,
        co: int,
        kernel: Kernel,
        *,
        stride: int = 1,
        padding: Kernel | None = None,
        groups: int = 1,
        eps: float = 1e-5,
        active: bool = True,
    ) -> None:
        super().__init__()
        around = ((kernel[0] - 1) // 2, (kernel[1] - 1) // 2) if padding is None else padding
        self.conv = nn.Conv2d(ci, co, kernel, stride, around, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(co, eps=eps)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, ci, h, w]."""
        y: Tensor = self.norm(self.conv(x))
        return torch.relu(y) if self.active else y


class Parallel(nn.ModuleList):
    """Branches over one input, their channels concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, ci, h, w] -> [n, sum of co, h', w']."""
        return torch.cat([branch(x) for branch in self], 1)


class Head(nn.Module):
    """Mean over space and a linear map: [n, c, h, w] -> [n, classes]."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, c, h, w]."""
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class Widths:
    """Inception's channel counts, or thin ones for tests: 8 for each 256 or part of them."""

    def __init__(self, *, thin: bool) -> None:
        self.thin = thin

    def __call__(self, channels: int) -> int:
        """The width used for a published one."""
        return 8 * -(-channels // 256) if self.thin else channels

    def total(self, *channels: int) -> int:
        """The width of branches concatenated."""
        return sum(self(c) for c in channels)


def chain(ci: int, *layers: tuple[int, Kernel], stride: int = 1) -> nn.Sequential:
    """Inception's layers in a row, (channels, kernel) each; a ``stride`` above one is the last one's, unpadded."""
    convs: list[nn.Module] = []
    for number, (co, kernel) in enumerate(layers):
        strided = stride > 1 and number == len(layers) - 1
        convs.append(
            Conv(ci, co, kernel, stride=stride if strided else 1, padding=(0, 0) if strided else None, eps=1e-3)
        )
        ci = co
    return nn.Sequential(*convs)


def pooled(ci: int, co: int) -> nn.Sequential:
    """Average over 3x3 (padding counted), then a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), *chain(ci, (co, POINT)))


def block_a(ci: int, pool: int, w: Widths) -> tuple[nn.Module, int]:
    """35x35: figure 5 of the paper, 5x5 kept as in torchvision."""
    module = Parallel(
        [
            chain(ci, (w(64), POINT)),
            chain(ci, (w(48), POINT), (w(64), (5, 5))),
            chain(ci, (w(64), POINT), (w(96), (3, 3)), (w(96), (3, 3))),
            pooled(ci, w(pool)),
        ]
    )
    return module, w.total(64, 64, 96, pool)


def block_b(ci: int, w: Widths) -> tuple[nn.Module, int]:
    """35x35 -> 17x17."""
    module = Parallel(
        [
            chain(ci, (w(384), (3, 3)), stride=2),
            chain(ci, (w(64), POINT), (w(96), (3, 3)), (w(96), (3, 3)), stride=2),
            nn.MaxPool2d(3, 2),
        ]
    )
    return module, w.total(384, 96) + ci


def block_c(ci: int, middle: int, w: Widths) -> tuple[nn.Module, int]:
    """17x17: figure 6 of the paper, n = 7."""
    m, out = w(middle), w(192)
    module = Parallel(
        [
            chain(ci, (out, POINT)),
            chain(ci, (m, POINT), (m, ROW), (out, COLUMN)),
            chain(ci, (m, POINT), (m, COLUMN), (m, ROW), (m, COLUMN), (out, ROW)),
            pooled(ci, out),
        ]
    )
    return module, 4 * out


def block_d(ci: int, w: Widths) -> tuple[nn.Module, int]:
    """17x17 -> 8x8."""
    module = Parallel(
        [
            chain(ci, (w(192), POINT), (w(320), (3, 3)), stride=2),
            chain(ci, (w(192), POINT), (w(192), ROW), (w(192), COLUMN), (w(192), (3, 3)), stride=2),
            nn.MaxPool2d(3, 2),
        ]
    )
    return module, w.total(320, 192) + ci


def block_e(ci: int, w: Widths) -> tuple[nn.Module, int]:
    """8x8: figure 7 of the paper."""

    def fork(c: int) -> Parallel:
        return Parallel([chain(c, (w(384), (1, 3))), chain(c, (w(384), (3, 1)))])

    module = Parallel(
        [
            chain(ci, (w(320), POINT)),
            nn.Sequential(*chain(ci, (w(384), POINT)), fork(w(384))),
            nn.Sequential(*chain(ci, (w(448), POINT), (w(384), (3, 3))), fork(w(384))),
            pooled(ci, w(192)),
        ]
    )
    return module, w.total(320, 384, 384, 384, 384, 192)


def inception(*, classes: int, thin: bool) -> nn.Module:
    """Inception-v3; thin: narrow, one block of each kind."""
    w = Widths(thin=thin)
    layers: list[nn.Module] = [
        Conv(3, w(32), (3, 3), stride=2, padding=(0, 0), eps=1e-3),
        Conv(w(32), w(32), (3, 3), padding=(0, 0), eps=1e-3),
        Conv(w(32), w(64), (3, 3), eps=1e-3),
        nn.MaxPool2d(3, 2),
        Conv(w(64), w(80), POINT, eps=1e-3),
        Conv(w(80), w(192), (3, 3), padding=(0, 0), eps=1e-3),
        nn.MaxPool2d(3, 2),
    ]
    ci = w(192)
    for pool in (32,) if thin else (32, 64, 64):
        module, ci = block_a(ci, pool, w)
        layers.append(module)
    module, ci = block_b(ci, w)
    layers.append(module)
    for middle in (128,) if thin else (128, 160, 160, 192):
        module, ci = block_c(ci, middle, w)
        layers.append(module)
    module, ci = block_d(ci, w)
    layers.append(module)
    for _ in range(1 if thin else 2):
        module, ci = block_e(ci, w)
        layers.append(module)
    return nn.Sequential(*layers, Head(ci, classes))


class Bottleneck(nn.Module):
    """1x1, grouped 3x3, 1x1, added to the input (or its projection): [n, ci, h, w] -> [n, co, h', w']."""

    def __init__(self, ci: int, width: int, co: int, *, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Conv(ci, width, POINT),
            Conv(width, width, (3, 3), stride=stride, groups=groups),
            Conv(width, co, POINT, active=False),
        )
        same = ci == co and stride == 1
        self.skip = nn.Identity() if same else Conv(ci, co, POINT, stride=stride, active=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, ci, h, w]."""
        return torch.relu(self.body(x) + self.skip(x))


def resnext(*, stem: int, depths: Sequence[int], width: int, groups: int, classes: int) -> nn.Module:
    """ResNeXt: stage i has depths[i] bottlenecks of 2^i width in ``groups``, out twice as wide."""
    layers: list[nn.Module] = [Conv(3, stem, (7, 7), stride=2), nn.MaxPool2d(3, 2, 1)]
    ci = stem
    for stage, depth in enumerate(depths):
        inner = width << stage
        for number in range(depth):
            stride = 2 if stage and not number else 1
            layers.append(Bottleneck(ci, inner, 2 * inner, stride=stride, groups=groups))
            ci = 2 * inner
    return nn.Sequential(*layers, Head(ci, classes))


class Fire(nn.Module):
    """A 1x1 squeeze, then 1x1 and 3x3 expansions side by side: [n, ci, h, w] -> [n, 2 expand, h, w]."""

    def __init__(self, ci: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(ci, squeeze, 1)
        self.point = nn.Conv2d(squeeze, expand, 1)
        self.square = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, ci, h, w]."""
        y = torch.relu(self.squeeze(x))
        return torch.cat((torch.relu(self.point(y)), torch.relu(self.square(y))), 1)


def squeezenet(*, stem: int, fires: Sequence[Sequence[tuple[int, int]]], classes: int) -> nn.Module:
    """Groups of (squeeze, expand) fires, a pooling before each; a convolution and a mean at the end.

    At the published size every window fits without a rest, so rounding up (`ceil_mode`) would be the same.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, stem, 3, 2), nn.ReLU()]
    ci = stem
    for group in fires:
        layers.append(nn.MaxPool2d(3, 2))
        for squeeze, expand in group:
            layers.append(Fire(ci, squeeze, expand))
            ci = 2 * expand
    layers += [nn.Conv2d(ci, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten()]
    return nn.Sequential(*layers)
