"""Models that make things: diffusion, decoders, flows, adversaries, codes."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


class ResBlock(nn.Module):
    """Two convolutions under group norms, the time added in between."""

    def __init__(self, wide: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, wide), nn.Conv2d(wide, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class SpatialAttention(nn.Module):
    """Attention over the places of an image."""

    def __init__(self, wide: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.GroupNorm(4, wide), nn.Conv2d(wide, 3 * wide, 1), nn.Conv2d(wide, wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        weight = torch.softmax(torch.einsum("bhcn,bhcm->bhnm", q, k) / math.sqrt(c // self.heads), dim=-1)
        found = torch.einsum("bhnm,bhcm->bhcn", weight, v).reshape(b, c, h, w)
        return x + self.out(found)


class DiffusionUNet(nn.Module):
    """Down, middle with attention, up with skips; the noise that was added is the target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([ResBlock(8, 8, 32), ResBlock(8, 16, 32)])
        self.pools = nn.ModuleList([nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1)])
        self.mid, self.attn = ResBlock(16, 16, 32), SpatialAttention(16)
        self.up = nn.ModuleList([ResBlock(32, 8, 32), ResBlock(16, 8, 32)])
        self.out = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0))

    def forward(self, x: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        keep = self.alphas[steps].view(-1, 1, 1, 1)
        x = keep.sqrt() * x + (1 - keep).sqrt() * noise
        freqs = torch.exp(-math.log(10000.0) * torch.arange(8, device=x.device) / 8)
        angles = steps[:, None].float() * freqs[None]
        t = self.embed(torch.cat([angles.sin(), angles.cos()], dim=-1))
        h, skips = self.conv_in(x), []
        for block, pool in zip(self.down, self.pools):  # noqa: B905  # as people write it
            h = block(h, t)
            skips.append(h)
            h = pool(h)
        h = self.attn(self.mid(h, t))
        for block in self.up:
            h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = block(torch.cat([h, skips.pop()], dim=1), t)
        return F.mse_loss(self.out(h), noise)


@stranger
def diffusion_unet() -> Made:
    images = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)
    return DiffusionUNet(), (*images, torch.randint(0, 50, (4,)))


class DiTBlock(nn.Module):
    """Norms without weights, shifted and scaled by what conditions."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(wide, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn = nn.MultiheadAttention(wide, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(approximate="tanh"), nn.Linear(4 * wide, wide))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(wide, 6 * wide))
        nn.init.normal_(self.ada[-1].weight, std=0.02)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        x = x + gate1.unsqueeze(1) * self.attn(h, h, h, need_weights=False)[0]
        h = self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        return x + gate2.unsqueeze(1) * self.mlp(h)


class DiT(nn.Module):
    """Patches, blocks, patches back, labels looked up with one more row for none."""

    def __init__(self, wide: int = 48) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, wide, 2, stride=2)
        self.label, self.pos = nn.Embedding(11, wide), nn.Parameter(torch.randn(1, 16, wide) * 0.02)
        self.blocks = nn.ModuleList([DiTBlock(wide) for _ in range(2)])
        self.final = nn.Linear(wide, 2 * 2 * 8)

    def forward(self, x: Tensor, y: Tensor, drop: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.where(drop, torch.full_like(y, 10), y)
        h = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        c = self.label(y)
        for block in self.blocks:
            h = block(h, c)
        h = self.final(h).reshape(-1, 4, 4, 2, 2, 8)
        h = torch.einsum("nhwpqc->nchpwq", h).reshape(-1, 8, 8, 8)
        mean, variance = h.chunk(2, dim=1)
        return mean, variance


@stranger
def dit() -> Made:
    return DiT(), (torch.randn(4, 4, 8, 8), torch.randint(0, 10, (4,)), torch.tensor([True, False, False, True]))


class Generator(nn.Module):
    """DCGAN's: transposed convolutions of all kinds, batch norms without bias before them."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(12, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 8, 3, 2, padding=1, output_padding=1, groups=4), nn.LeakyReLU(0.2, inplace=True),
            nn.ConvTranspose2d(8, 3, 3, 1, padding=2, dilation=2), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z.view(z.size(0), -1, 1, 1))


@stranger
def dcgan_generator() -> Made:
    return Generator(), torch.randn(6, 12)


class Discriminator(nn.Module):
    """Spectral norms on every layer, a class's direction added."""

    def __init__(self) -> None:
        super().__init__()
        spectral = nn.utils.spectral_norm
        self.convs = nn.ModuleList([spectral(nn.Conv2d(3, 8, 3, 2, 1)), spectral(nn.Conv2d(8, 16, 3, 2, 1))])
        self.out, self.embed = spectral(nn.Linear(16, 1)), spectral(nn.Embedding(5, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
        h = torch.sum(x, dim=(2, 3))
        return self.out(h) + torch.sum(self.embed(y) * h, dim=1, keepdim=True)


@stranger
def old_spectral_norms() -> Made:
    return Discriminator(), (torch.randn(4, 3, 8, 8), ids(4, below=5))


class Coupling(nn.Module):
    """A flow: half of what is seen scales the other half; the logarithm of the determinant is returned."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 8))
        self.log_scale, self.bias = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (x + self.bias) * self.log_scale.exp()
        a, b = x[:, ::2], x[:, 1::2]
        if self.flip:
            a, b = b, a
        s, t = self.net(a).split(4, dim=-1)
        s = torch.tanh(s)
        b = b * torch.exp(s) + t
        out = torch.stack([a, b], dim=-1).flatten(1)
        return out, s.sum(-1) + self.log_scale.sum()


class Flow(nn.Module):
    """Layers of it, and the likelihood by ``torch.distributions``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Coupling(bool(i % 2)) for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0])
        for layer in self.layers:
            x, logdet = layer(x)
            total += logdet
        prior = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x))
        return -(prior.log_prob(x).sum(-1) + total).mean()


@stranger
def normalizing_flow() -> Made:
    return Flow(), torch.randn(6, 8)


class Teacher(nn.Module):
    """Distillation: a copy that is held still, a student, soft and hard targets with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 7))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        nn.init.normal_(self.teacher[0].weight)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / 2.0, dim=-1)
        logits = self.student(x)
        kl = F.kl_div(F.log_softmax(logits / 2.0, dim=-1), soft, reduction="batchmean") * 4.0
        hard = F.cross_entropy(logits, y, label_smoothing=0.1, weight=torch.linspace(0.5, 1.5, 7))
        return {"loss": 0.7 * kl + 0.3 * hard, "logits": logits}


@stranger
def distillation() -> Made:
    return Teacher(), {"x": torch.randn(6, 10), "y": ids(6, below=7)}


class MaskedAutoencoder(nn.Module):
    """MAE: patches that are kept are gathered by an argsort, restored with a token, the loss on what was hidden."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        self.embed, self.pos = nn.Linear(12, wide), nn.Parameter(torch.randn(1, 9, wide) * 0.02)
        layer: dict[str, Any] = {"nhead": 3, "dim_feedforward": 40, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoderLayer(wide, **layer)
        self.decoder = nn.TransformerEncoderLayer(wide, norm_first=True, activation="gelu", **layer)
        self.token, self.head = nn.Parameter(torch.zeros(1, 1, wide)), nn.Linear(wide, 12)

    def forward(self, patches: Tensor, noise: Tensor) -> Tensor:
        n, length, _ = patches.shape
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        x = self.embed(patches) + self.pos
        kept = torch.gather(x, 1, shuffle[:, :5].unsqueeze(-1).repeat(1, 1, x.shape[-1]))
        h = self.encoder(kept)
        h = torch.cat([h, self.token.repeat(n, length - 5, 1)], dim=1)
        h = torch.gather(h, 1, restore.unsqueeze(-1).repeat(1, 1, h.shape[-1])) + self.pos
        mask = torch.ones(n, length, device=x.device)
        mask[:, :5] = 0
        mask = torch.gather(mask, 1, restore)
        loss = (self.head(self.decoder(h)) - patches).pow(2).mean(-1)
        return (loss * mask).sum() / mask.sum()


@stranger
def masked_autoencoder() -> Made:
    return MaskedAutoencoder(), (torch.randn(4, 9, 12), torch.rand(4, 9))


class StyleLayer(nn.Module):
    """StyleGAN2's modulated convolution: weights of each sample, run as one grouped convolution."""

    def __init__(self, wide: int = 6, out: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, out, wide, 3, 3))
        self.style, self.scale = nn.Linear(10, wide), 1 / math.sqrt(wide * 9)
        self.noise, self.bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, out, 1, 1))

    def forward(self, x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
        b, c, height, width = x.shape
        weight = self.scale * self.weight * self.style(w).view(b, 1, c, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)
        x = x.reshape(1, b * c, height, width)
        out = F.conv2d(x, weight.view(b * weight.shape[1], c, 3, 3), padding=1, groups=b)
        out = out.view(b, -1, height, width)
        return F.leaky_relu(out + self.noise * noise + self.bias, 0.2) * math.sqrt(2)


@stranger
def modulated_convolution() -> Made:
    return StyleLayer(), (torch.randn(4, 6, 6, 6), torch.randn(4, 10), torch.randn(4, 1, 6, 6))
