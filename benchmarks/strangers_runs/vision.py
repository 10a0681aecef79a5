"""Pictures: convolutions with statistics, patches, U-shapes, upsampling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, stranger


class BasicBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(cout), nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avg, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.avg(self.layers(self.pool(self.stem(x)))), 1))


@stranger
def small_resnet() -> Made:
    return SmallResNet(), torch.randn(4, 3, 32, 32)


@stranger
def small_resnet_channels_last() -> Made:
    return SmallResNet().to(memory_format=torch.channels_last), torch.randn(4, 3, 32, 32).contiguous(
        memory_format=torch.channels_last
    )


@stranger
def small_resnet_odd() -> Made:
    return SmallResNet(), torch.randn(3, 3, 29, 31)


@stranger
def small_resnet_evaluated() -> Made:
    return SmallResNet().eval(), torch.randn(4, 3, 32, 32)


class ViT(nn.Module):
    """A token of class, positions, patches by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.pos
        return self.head(self.blocks(x)[:, 0])


@stranger
def vit() -> Made:
    return ViT(), torch.randn(4, 3, 16, 16)


class UNet(nn.Module):
    """Skips by concatenation, transposed convolutions, group norms, a time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.down1, self.down2 = self._conv(3, 8), self._conv(8, 16)
        self.mid = nn.ModuleList([self._conv(16, 16), self._conv(16, 16)])
        self.up1 = nn.ConvTranspose2d(16, 8, 2, 2)
        self.up2 = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(16, 8, 3, padding=1))
        self.out = nn.Conv2d(11, 3, 1)

    @staticmethod
    def _conv(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.SiLU())

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        freqs = torch.exp(-torch.arange(8) * 0.5)
        angles = t[:, None].float() * freqs[None]
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        d1 = self.down1(x)
        d2 = self.down2(F.max_pool2d(d1, 2)) + emb[:, :, None, None]
        y = F.avg_pool2d(d2, 2)
        for layer in self.mid:
            y = layer(y) + y
        y = torch.cat([self.up1(y), F.max_pool2d(d1, 2)], dim=1)
        return self.out(torch.cat([self.up2(y), x], 1))


@stranger
def unet() -> Made:
    return UNet(), (torch.randn(4, 3, 16, 16), torch.randint(0, 100, (4,)))


class Inverted(nn.Module):
    """Depthwise convolutions, squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32), nn.Hardswish())
        self.depth = nn.Sequential(nn.Conv2d(32, 32, 5, padding=2, groups=32), nn.BatchNorm2d(32), nn.ReLU6())
        self.se = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1), nn.Hardsigmoid()
        )
        self.project = nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        return x + self.project(y * self.se(y))


@stranger
def inverted_residual() -> Made:
    return Inverted(), torch.randn(4, 8, 10, 10)


class ConvAttention(nn.Module):
    """Convolution, then attention over pixels, then back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(2, 16)
        self.qkv, self.proj = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)
        self.gamma = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        b, c, h, w = x.shape
        q, k, v = torch.chunk(self.qkv(self.norm(x)), 3, dim=1)
        q, k, v = q.reshape(b, c, -1).permute(0, 2, 1), k.reshape(b, c, -1), v.reshape(b, c, -1)
        w_ = torch.softmax(torch.bmm(q, k) * c**-0.5, dim=2)
        return x + self.gamma * self.proj(torch.bmm(v, w_.permute(0, 2, 1)).reshape(b, c, h, w))


@stranger
def conv_attention() -> Made:
    return ConvAttention(), torch.randn(4, 4, 5, 7)


class ConvNext(nn.Module):
    """Norms over the last dim after a permutation; a learned scale; in-place ops."""

    def __init__(self) -> None:
        super().__init__()
        self.dw, self.norm = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16, eps=1e-6)
        self.pw1, self.pw2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(1e-1 * torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dw(x).permute(0, 2, 3, 1)
        y = self.pw2(F.gelu(self.pw1(self.norm(y)))).mul_(self.scale)
        return x + y.permute(0, 3, 1, 2)


@stranger
def convnext() -> Made:
    return ConvNext(), torch.randn(4, 16, 6, 6)


class VAE(nn.Module):
    """Noise given, a Kullback-Leibler term returned beside the picture, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.Tanh())
        self.mu, self.logvar, self.dec = nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(8, 48)

    def forward(self, x: Tensor, eps: Tensor) -> dict[str, Tensor]:
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + eps * torch.exp(0.5 * logvar)
        recon = torch.sigmoid(self.dec(z)).view_as(x)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
        return {"recon": recon, "kl": kl.mean(), "z": z}


@stranger
def vae() -> Made:
    return VAE(), (torch.randn(8, 3, 4, 4), torch.randn(8, 8))


class PixelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PReLU(12), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        up = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return (self.body(x) + up).clamp(0, 1)


@stranger
def pixel_shuffle() -> Made:
    return PixelShuffle(), torch.rand(4, 3, 5, 6)


class SpectralNorms(nn.Module):
    """Parametrizations: weight norm, orthogonal-free spectral norm by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(16, 32))
        self.b = nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.leaky_relu(self.a(x), 0.2).transpose(1, 2))


@stranger
def weight_norms() -> Made:
    return SpectralNorms(), torch.randn(4, 6, 16)


@stranger
def old_weight_norm() -> Made:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4)), torch.randn(8, 16)


@stranger
def spectral_norm() -> Made:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32))
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(32, 4)), torch.randn(8, 16)


class Volume(nn.Module):
    """Three dims of space."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x))).mean(dim=(2, 3, 4)))


@stranger
def volume() -> Made:
    return Volume(), torch.randn(4, 2, 4, 5, 6)
