"""Attention as people write it: masks, rotary embeddings, caches of positions, torch's own modules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


class CausalSelfAttention(nn.Module):
    """After nanoGPT: one product for queries, keys and values, and a buffer of the mask."""

    def __init__(self, width: int = 32, heads: int = 4, longest: int = 24) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads, self.width = heads, width
        self.register_buffer("bias", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class NanoBlock(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class NanoGPT(nn.Module):
    """Tied weights, a loss inside of forward where targets are given."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(40, 32), "wpe": nn.Embedding(24, 32),
            "h": nn.ModuleList([NanoBlock() for _ in range(2)]), "ln_f": nn.LayerNorm(32),
        })  # fmt: skip
        self.lm_head = nn.Linear(32, 40, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        positions = torch.arange(0, idx.shape[1], dtype=torch.long, device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@stranger
def nano_gpt() -> Made:
    return NanoGPT(), ids(8, 12)


@stranger
def nano_gpt_with_loss() -> Made:
    return NanoGPT(), (ids(8, 12), ids(8, 12))


@stranger
def nano_gpt_batch_of_one() -> Made:
    return NanoGPT(), ids(1, 13)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.type_as(x) * self.weight


class Rotary(nn.Module):
    """Angles in buffers that are not saved."""

    def __init__(self, width: int, longest: int = 64) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
        angles = torch.outer(torch.arange(longest).float(), inv_freq)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        return x * self.cos[:t] + torch.cat((-second, first), dim=-1) * self.sin[:t]


class GroupedAttention(nn.Module):
    """After Llama: fewer keys and values, repeated by ``expand``."""

    def __init__(self, width: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.wq = nn.Linear(width, heads * self.head, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head, bias=False)
        self.wo = nn.Linear(heads * self.head, width, bias=False)
        self.rotary = Rotary(self.head)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        q = self.rotary(self.wq(x).view(b, t, self.heads, self.head).transpose(1, 2))
        k = self.rotary(self.wk(x).view(b, t, self.kv_heads, self.head).transpose(1, 2))
        v = self.wv(x).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        k, v = (self._repeat(y) for y in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head)
        if mask is not None:
            scores = scores + mask
        out = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        return self.wo(out.transpose(1, 2).contiguous().view(b, t, -1))

    def _repeat(self, x: Tensor) -> Tensor:
        b, heads, t, d = x.shape
        times = self.heads // self.kv_heads
        return x[:, :, None, :, :].expand(b, heads, times, t, d).reshape(b, heads * times, t, d)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TinyLlama(nn.Module):
    """A mask made by ``triu`` in forward; layers in a list, called with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(48, 32)
        self.layers = nn.ModuleList([
            nn.ModuleDict({"a": GroupedAttention(), "f": SwiGLU(32, 88), "an": RMSNorm(32), "fn": RMSNorm(32)})
            for _ in range(2)
        ])  # fmt: skip
        self.norm, self.output = RMSNorm(32), nn.Linear(32, 48, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        mask = torch.full((tokens.size(1), tokens.size(1)), float("-inf"), device=tokens.device)
        mask = torch.triu(mask, diagonal=1)
        for layer in self.layers:
            h = h + layer["a"](layer["an"](h), mask=mask)
            h = h + layer["f"](layer["fn"](h))
        return self.output(self.norm(h)).float()


@stranger
def tiny_llama() -> Made:
    return TinyLlama(), (ids(4, 16),)


class PaddedEncoder(nn.Module):
    """torch's layers with a padding mask made of the tokens."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        pad = tokens == 0
        h = self.encoder(self.emb(tokens), src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).float()
        return self.head((h * keep).sum(1) / keep.sum(1).clamp(min=1.0))


@stranger
def padded_encoder() -> Made:
    tokens = ids(8, 10, below=39) + 1
    tokens[:, 7:] = 0
    return PaddedEncoder(), tokens


@stranger
def padded_encoder_norm_first() -> Made:
    return PaddedEncoder(norm_first=True), ids(4, 9, below=39) + 1


class MultiheadOutside(nn.Module):
    """nn.MultiheadAttention between two sequences, its weights returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(24, 3, kdim=16, vdim=16, batch_first=True)
        self.out = nn.Linear(24, 24)

    def forward(self, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.mha(query, memory, memory, average_attn_weights=True)
        return self.out(y) + query, weights


@stranger
def multihead_outside() -> Made:
    return MultiheadOutside(), (torch.randn(6, 5, 24), torch.randn(6, 7, 16))


class SequenceFirst(nn.Module):
    """The batch is dim 1, as torch's layers have it unless told."""

    def __init__(self) -> None:
        super().__init__()
        self.mha, self.norm = nn.MultiheadAttention(32, 4), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mha(x, x, x, need_weights=False)[0])


@stranger
def sequence_first() -> Made:
    return SequenceFirst(), torch.randn(10, 4, 32)


class EncoderDecoder(nn.Module):
    """nn.Transformer with a square mask."""

    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(30, 32), nn.Embedding(30, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(32, 30)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        h = self.transformer(self.src(src), self.tgt(tgt), tgt_mask=mask, tgt_is_causal=True)
        return F.log_softmax(self.generator(h), dim=-1)


@stranger
def encoder_decoder() -> Made:
    return EncoderDecoder(), (ids(4, 9, below=30), ids(4, 7, below=30))


class LinearAttention(nn.Module):
    """Kernel feature maps and einsum in place of softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bhnd,bhne->bhde", k, v)
        norm = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(2)) + 1e-6)
        y = torch.einsum("bhnd,bhde,bhn->bhne", q, kv, norm)
        return self.out(y.permute(0, 2, 1, 3).flatten(2))


@stranger
def linear_attention() -> Made:
    return LinearAttention(), torch.randn(4, 6, 32)


class Alibi(nn.Module):
    """Slopes as a plain attribute tensor, distances computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.slopes = torch.tensor([2.0 ** -(i + 1) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, 4, c // 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        place = torch.arange(t)
        bias = -(place[None, :] - place[:, None]).abs() * self.slopes[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return y.transpose(1, 2).reshape(b, t, c)


@stranger
def alibi() -> Made:
    return Alibi(), torch.randn(4, 7, 32)


class RelativeBias(nn.Module):
    """After Swin: a table of biases that is read by a buffer of indices."""

    def __init__(self, side: int = 4, heads: int = 4, width: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.2)
        coords = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + side - 1
        self.register_buffer("index", apart[..., 0] * (2 * side - 1) + apart[..., 1])
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))


@stranger
def relative_bias() -> Made:
    return RelativeBias(), torch.randn(4, 16, 32)


class Windows(nn.Module):
    """Windows taken by views, shifted by roll."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = RelativeBias(), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), shifts=(-2, -2), dims=(1, 2))
        y = y.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, c)
        y = self.attn(y).view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + torch.roll(y, shifts=(2, 2), dims=(1, 2))


@stranger
def shifted_windows() -> Made:
    return Windows(), torch.randn(2, 8, 8, 32)


class ComplexRotary(nn.Module):
    """After Llama's first code: angles as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        freqs = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        table = torch.outer(torch.arange(16).float(), freqs)
        self.freqs_cis = torch.polar(torch.ones_like(table), table)
        self.wq, self.wk, self.wv = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def _turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.freqs_cis[: x.shape[1]].view(1, x.shape[1], 1, -1)
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, 4, 8) for f in (self.wq, self.wk, self.wv))
        q, k, v = self._turn(q).transpose(1, 2), self._turn(k).transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)


@stranger
def complex_rotary() -> Made:
    return ComplexRotary(), torch.randn(4, 9, 32)


class Perceiver(nn.Module):
    """Latents that are one parameter, expanded over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 6, 32) * 0.2)
        self.cross = nn.MultiheadAttention(32, 4, batch_first=True)
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        latents = torch.cat([self.cls.expand(b, -1, -1), self.latents.repeat(b, 1, 1)], dim=1)
        out, _ = self.cross(latents, x, x)
        return self.norm(out + latents)[:, 0]


@stranger
def perceiver() -> Made:
    return Perceiver(), torch.randn(6, 11, 32)
