"""What stands in place of attention, or around it, as public repositories of the last years write it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


class Retention(nn.Module):
    """RetNet in its parallel form: decay by distance, xpos as pairs, a group norm over heads, a gate."""

    def __init__(self, wide: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.head = heads, wide // heads
        self.wq, self.wk, self.wv = (nn.Linear(wide, wide, bias=False) for _ in range(3))
        self.wg, self.wo = nn.Linear(wide, wide, bias=False), nn.Linear(wide, wide, bias=False)
        self.norm = nn.GroupNorm(heads, wide, affine=False)
        self.gammas = (1 - torch.exp(torch.linspace(math.log(1 / 32), math.log(1 / 512), heads))).tolist()

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        n = torch.arange(t, device=x.device).unsqueeze(1)
        m = torch.arange(t, device=x.device).unsqueeze(0)
        decay = torch.stack([(g ** (n - m)) * (n >= m).float() for g in self.gammas])
        decay[decay != decay] = 0  # noqa: PLR0124  # not a number
        q, k, v = (w(x).view(b, t, self.heads, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = (q @ k.transpose(-1, -2) * self.head**-0.5 * decay.unsqueeze(0)) @ v
        y = self.norm(y.transpose(1, 2).reshape(b * t, c)).reshape(x.shape)
        return self.wo(F.silu(self.wg(x)) * y)


@stranger
def retention() -> Made:
    return Retention(), torch.randn(4, 6, 16)


class MinLSTM(nn.Module):
    """A recurrence with gates that do not see the state, as a scan in logarithms."""

    def __init__(self, wide: int = 12) -> None:
        super().__init__()
        self.f, self.i, self.h = nn.Linear(wide, wide), nn.Linear(wide, wide), nn.Linear(wide, wide)

    @staticmethod
    def log_g(x: Tensor) -> Tensor:
        return torch.where(x >= 0, (F.relu(x) + 0.5).log(), -F.softplus(-x))

    def forward(self, x: Tensor) -> Tensor:
        diff = F.softplus(-self.f(x)) - F.softplus(-self.i(x))
        log_f, log_i = -F.softplus(diff), -F.softplus(-diff)
        values = F.pad(log_i + self.log_g(self.h(x)), (0, 0, 1, 0), value=math.log(0.5))
        star = F.pad(torch.cumsum(log_f, dim=1), (0, 0, 1, 0))
        return torch.exp(star + torch.logcumsumexp(values - star, dim=1))[:, 1:]


@stranger
def min_lstm() -> Made:
    return MinLSTM(), torch.randn(4, 5, 12)


class GatedRecurrence(nn.Module):
    """Griffin's RG-LRU, a loop over time: a decay to the power of a gate, inputs scaled by what is left."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        self.a_gate, self.x_gate = nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.a_param = nn.Parameter(torch.linspace(0.1, 1.0, wide))
        self.conv = nn.Conv1d(wide, wide, 4, groups=wide, padding=3)
        self.left, self.right, self.out = nn.Linear(8, wide), nn.Linear(8, wide), nn.Linear(wide, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.left(x), approximate="tanh")
        y = self.conv(self.right(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        log_a = -8.0 * torch.sigmoid(self.a_gate(y)) * F.softplus(self.a_param)
        a, scale = log_a.exp(), torch.sqrt(1 - torch.exp(2 * log_a) + 1e-6)
        scaled, h, seen = y * torch.sigmoid(self.x_gate(y)) * scale, torch.zeros_like(y[:, 0]), []
        for t in range(x.size(1)):
            h = a[:, t] * h + scaled[:, t]
            seen += [h]
        return self.out(torch.stack(seen, dim=1) * gate)


@stranger
def gated_recurrence() -> Made:
    return GatedRecurrence(), torch.randn(4, 5, 8)


class LatentAttention(nn.Module):
    """DeepSeek's attention: keys and values from a narrow latent, a part of the key rotated and shared by all heads."""

    def __init__(self, wide: int = 32, heads: int = 4, nope: int = 8, rope: int = 4) -> None:
        super().__init__()
        self.heads, self.nope, self.rope = heads, nope, rope
        self.wq = nn.Linear(wide, heads * (nope + rope), bias=False)
        self.wkv_a, self.kv_norm = nn.Linear(wide, 12 + rope, bias=False), nn.RMSNorm(12)
        self.wkv_b = nn.Linear(12, heads * (nope + nope), bias=False)
        self.wo = nn.Linear(heads * nope, wide, bias=False)
        self.register_buffer("freqs", 1 / 10000 ** (torch.arange(0, rope, 2) / rope), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.size(1), device=x.device), self.freqs)[None, :, None]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        return torch.stack(turned, -1).flatten(-2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.size()
        q_nope, q_pe = torch.split(self.wq(x).view(b, t, self.heads, -1), [self.nope, self.rope], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [12, self.rope], dim=-1)
        q_pe, k_pe = self.rotate(q_pe), self.rotate(k_pe.unsqueeze(2))
        k_nope, v = self.wkv_b(self.kv_norm(kv)).view(b, t, self.heads, -1).chunk(2, dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q_nope, k_nope) + torch.einsum("bshd,btd->bsht", q_pe, k_pe.squeeze(2))
        scores = scores * (self.nope + self.rope) ** -0.5
        if mask is None:
            mask = torch.full((t, t), float("-inf"), device=x.device).triu_(1)
        scores = (scores + mask.unsqueeze(1)).softmax(dim=-1, dtype=torch.float32).type_as(x)
        return self.wo(torch.einsum("bsht,bthd->bshd", scores, v).flatten(2))


@stranger
def latent_attention() -> Made:
    return LatentAttention(), torch.randn(4, 6, 32)


class Differential(nn.Module):
    """Two attentions, one less the other times a learned lambda, heads normed apart."""

    def __init__(self, wide: int = 16, heads: int = 2, depth: int = 1) -> None:
        super().__init__()
        self.heads, self.head = heads, wide // heads // 2
        self.qkv, self.out = nn.Linear(wide, 3 * wide, bias=False), nn.Linear(wide, wide, bias=False)
        names = ("q1", "k1", "q2", "k2")
        self.lambdas = nn.ParameterDict({k: nn.Parameter(0.3 * torch.randn(self.head)) for k in names})
        self.subln = nn.RMSNorm(2 * self.head, eps=1e-5)
        self.init = 0.8 - 0.6 * math.exp(-0.3 * depth)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = (y.view(b, t, 2 * self.heads, self.head).transpose(1, 2) for y in (q, k))
        v = v.view(b, t, self.heads, 2 * self.head).transpose(1, 2)
        weights = torch.nan_to_num(torch.matmul(q * self.head**-0.5, k.transpose(-1, -2)))
        weights += torch.triu(torch.zeros([t, t]).float().fill_(float("-inf")).type_as(weights), 1)
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).type_as(weights).view(b, self.heads, 2, t, t)
        one = torch.exp(torch.sum(self.lambdas["q1"] * self.lambdas["k1"], dim=-1).float())
        two = torch.exp(torch.sum(self.lambdas["q2"] * self.lambdas["k2"], dim=-1).float())
        found = torch.matmul(weights[:, :, 0] - (one - two + self.init) * weights[:, :, 1], v)
        return self.out(self.subln(found).mul(1 - self.init).transpose(1, 2).reshape(b, t, c))


@stranger
def differential_attention() -> Made:
    return Differential(), torch.randn(4, 5, 16)


class RelativeShift(nn.Module):
    """Transformer-XL: scores by distance, shifted into place by a pad and a view; learned u and v; a memory."""

    def __init__(self, wide: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.head = heads, wide // heads
        self.q, self.kv = nn.Linear(wide, wide, bias=False), nn.Linear(wide, 2 * wide, bias=False)
        self.r = nn.Linear(wide, wide, bias=False)
        self.u, self.v = nn.Parameter(torch.randn(heads, self.head)), nn.Parameter(torch.randn(heads, self.head))
        self.o, self.norm = nn.Linear(wide, wide, bias=False), nn.LayerNorm(wide)
        self.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, wide, 2.0) / wide)))

    def forward(self, w: Tensor, mems: Tensor) -> Tensor:
        qlen, bsz = w.size(0), w.size(1)
        cat = torch.cat([mems, w], 0)
        klen = cat.size(0)
        pos = torch.arange(klen - 1, -1, -1.0, device=w.device)
        sinusoid = torch.ger(pos, self.inv_freq)
        r = self.r(torch.cat([sinusoid.sin(), sinusoid.cos()], dim=-1)).view(klen, self.heads, self.head)
        q = self.q(w).view(qlen, bsz, self.heads, self.head)
        k, v = torch.chunk(self.kv(cat).view(klen, bsz, 2 * self.heads, self.head), 2, dim=2)
        ac = torch.einsum("ibnd,jbnd->ijbn", (q + self.u, k))
        bd = torch.einsum("ibnd,jnd->ijbn", (q + self.v, r))
        padded = torch.cat([torch.zeros((qlen, 1, *bd.size()[2:]), device=w.device), bd], dim=1)
        bd = padded.view(klen + 1, qlen, *bd.size()[2:])[1:].view_as(bd)
        mask = torch.triu(w.new_ones(qlen, klen), diagonal=1 + klen - qlen).bool()[:, :, None, None]
        score = ((ac + bd) * self.head**-0.5).float().masked_fill(mask, -1e30).type_as(ac)
        vec = torch.einsum("ijbn,jbnd->ibnd", (F.softmax(score, dim=1), v))
        return self.norm(w + self.o(vec.contiguous().view(qlen, bsz, -1)))


@stranger
def transformer_xl() -> Made:
    return RelativeShift(), {"w": torch.randn(4, 4, 16), "mems": torch.randn(3, 4, 16)}


class Performer(nn.Module):
    """Positive random features of a fixed projection, stabilized by maxima without gradient."""

    def __init__(self, wide: int = 16, heads: int = 2, features: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.register_buffer("projection", torch.randn(features, wide // heads))

    def kernel(self, data: Tensor, *, is_query: bool, eps: float = 1e-4) -> Tensor:
        normalizer = data.shape[-1] ** -0.25
        dash = torch.einsum("...id,...jd->...ij", normalizer * data, self.projection)
        diag = (data**2).sum(-1, keepdim=True) / 2 * normalizer**2
        stab = torch.amax(dash, dim=-1 if is_query else (-1, -2), keepdim=True).detach()
        return self.projection.shape[0] ** -0.5 * (torch.exp(dash - diag - stab) + eps)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.to_qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.kernel(q, is_query=True), self.kernel(k, is_query=False)
        inverse = 1.0 / torch.einsum("...nd,...d->...n", q, k.sum(dim=-2))
        context = torch.einsum("...nd,...ne->...de", k, v)
        found = torch.einsum("...de,...nd,...n->...ne", context, q, inverse)
        return self.to_out(found.transpose(1, 2).reshape(b, n, c))


@stranger
def performer() -> Made:
    return Performer(), torch.randn(4, 6, 16)


class MemoryTokens(nn.Module):
    """As x-transformers: memory keys, a shift of half the channels, GLU, scales that start at zero, talking heads."""

    def __init__(self, wide: int = 16, heads: int = 4, memories: int = 3) -> None:
        super().__init__()
        self.heads, self.scale = heads, (wide // heads) ** -0.5
        self.mem_k, self.mem_v = (nn.Parameter(torch.randn(heads, memories, wide // heads)) for _ in range(2))
        self.to_q, self.to_kv = nn.Linear(wide, wide, bias=False), nn.Linear(wide, 2 * wide, bias=False)
        self.pre, self.post = nn.Conv2d(heads, heads, 1, bias=False), nn.Conv2d(heads, heads, 1, bias=False)
        self.out, self.g = nn.Sequential(nn.Linear(wide, 2 * wide), nn.GLU()), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, *, pos: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if pos is not None:
            x = x + pos
        stay, move = x.chunk(2, dim=-1)
        h = torch.cat((stay, F.pad(move, (0, 0, 1, -1), value=0.0)), dim=-1)
        b, n = h.shape[:2]
        q, k, v = (y.reshape(b, n, self.heads, -1).transpose(1, 2) for y in (self.to_q(h), *self.to_kv(h).chunk(2, -1)))
        k = torch.cat((self.mem_k.unsqueeze(0).expand(b, -1, -1, -1), k), dim=-2)
        v = torch.cat((self.mem_v.unsqueeze(0).expand(b, -1, -1, -1), v), dim=-2)
        dots = self.pre(torch.einsum("bhid,bhjd->bhij", q, k) * self.scale)
        if mask is not None:
            seen = F.pad(mask, (self.mem_k.shape[1], 0), value=True)
            dots = dots.masked_fill(~seen[:, None, None, :], -torch.finfo(dots.dtype).max)
        found = torch.einsum("bhij,bhjd->bhid", self.post(dots.softmax(dim=-1)), v)
        return x + self.out(found.transpose(1, 2).flatten(2)) * self.g.tanh()


@stranger
def memory_tokens() -> Made:
    mask = torch.arange(5)[None] < torch.tensor([5, 3, 4, 1])[:, None]
    return MemoryTokens(), {"x": torch.randn(4, 5, 16), "mask": mask}


class DeltaRule(nn.Module):
    """Fast weights that are written by their error: a loop over time with outer products and normed keys."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(wide, wide), nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.beta = nn.Linear(wide, 1)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s = x.new_zeros(x.size(0), x.size(2), x.size(2)) if state is None else state
        out = torch.empty_like(x)
        for i, token in enumerate(x.unbind(dim=1)):
            k, q = F.normalize(F.elu(self.k(token)) + 1, p=1, dim=-1), F.softmax(self.q(token), -1)
            error = self.v(token) - (s @ k.unsqueeze(-1)).squeeze(-1)
            s = s + torch.sigmoid(self.beta(token)).unsqueeze(-1) * error.unsqueeze(2) * k.unsqueeze(1)
            out[:, i] = torch.bmm(s, q.unsqueeze(2)).squeeze(2)
        return out, s


@stranger
def delta_rule() -> Made:
    return DeltaRule(), torch.randn(4, 4, 8)


class Diagonal(nn.Module):
    """S4D: a kernel made of complex exponentials, convolved by FFT; a skip; a gated output."""

    def __init__(self, wide: int = 8, states: int = 4) -> None:
        super().__init__()
        self.d, self.log_dt = nn.Parameter(torch.randn(wide)), nn.Parameter(torch.linspace(-6, -2, wide))
        self.c = nn.Parameter(torch.view_as_real(torch.randn(wide, states, dtype=torch.cfloat)))
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(wide, states)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(states).float().repeat(wide, 1))
        self.output = nn.Sequential(nn.Conv1d(wide, 2 * wide, kernel_size=1), nn.GLU(dim=-2))

    def forward(self, u: Tensor) -> Tensor:
        length = u.size(-1)
        dt, c = torch.exp(self.log_dt), torch.view_as_complex(self.c)
        a = -torch.exp(self.log_a_real) + 1j * self.a_imag
        dta = a * dt.unsqueeze(-1)
        k = dta.unsqueeze(-1) * torch.arange(length, device=u.device)
        c = c * (torch.exp(dta) - 1.0) / a
        k = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(k)).real
        spectrum = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(k, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        return self.output(F.gelu(y + u * self.d.unsqueeze(-1)))


@stranger
def diagonal_states() -> Made:
    return Diagonal(), torch.randn(4, 8, 10)


class NormalizedGPT(nn.Module):
    """nGPT: weights and states on a sphere, steps with learned rates, tied to nothing."""

    def __init__(self, vocab: int = 32, wide: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.wte, self.lm_head = heads, nn.Embedding(vocab, wide), nn.Linear(wide, vocab, bias=False)
        self.qkv = nn.ParameterList([nn.Parameter(torch.randn(3 * wide, wide)) for _ in range(layers)])
        self.proj = nn.ParameterList([nn.Parameter(torch.randn(wide, wide)) for _ in range(layers)])
        self.alpha = nn.Parameter(torch.full((layers, wide), 0.05))
        self.sqk, self.sz = nn.Parameter(torch.ones(layers, wide)), nn.Parameter(torch.ones(vocab))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        h = F.normalize(F.embedding(idx, F.normalize(self.wte.weight, dim=-1)), dim=-1)
        for w, o, alpha, s in zip(self.qkv, self.proj, self.alpha, self.sqk, strict=True):
            q, k, v = F.linear(h, F.normalize(w, dim=1)).split(h.size(-1), dim=2)
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
            q, k = (F.normalize(y, dim=-1) * s.view(1, self.heads, 1, -1) for y in (q, k))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q.size(-1) ** 0.5)
            step = F.normalize(F.linear(y.transpose(1, 2).flatten(2), F.normalize(o, dim=0)), dim=-1)
            h = F.normalize(torch.lerp(h, step, alpha.abs()), dim=-1)
        logits = self.sz * F.linear(h, F.normalize(self.lm_head.weight, dim=-1)) * 4.0
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


@stranger
def normalized_gpt() -> Made:
    labels = ids(4, 6)
    labels[1, 2:] = -1
    return NormalizedGPT(), {"idx": ids(4, 6), "targets": labels}


class BlockLocal(nn.Module):
    """Longformer-like: queries in blocks, keys of the neighbours by unfold, edges masked; one global token."""

    def __init__(self, wide: int = 12, heads: int = 2, block: int = 2) -> None:
        super().__init__()
        self.block, self.heads = block, heads
        self.qkv, self.cls = nn.Linear(wide, 3 * wide), nn.Parameter(torch.zeros(1, 1, wide))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        w, h = self.block, self.heads
        q, k, v = self.qkv(x + self.cls).view(b, n, 3, h, c // h).permute(2, 0, 3, 1, 4).unbind(0)
        around = F.pad(torch.ones(n, device=x.device), (w, w)).unfold(0, 3 * w, w)
        k, v = (F.pad(y, (0, 0, w, w)).unfold(2, 3 * w, w) for y in (k, v))
        scores = torch.einsum("bhgid,bhgdj->bhgij", q.reshape(b, h, n // w, w, -1), k) / math.sqrt(c // h)
        scores = scores.masked_fill(around[None, None, :, None] == 0, float("-inf"))
        out = torch.einsum("bhgij,bhgdj->bhgid", scores.softmax(-1), v)
        return out.reshape(b, h, n, -1).transpose(1, 2).reshape(b, n, c)


@stranger
def block_local() -> Made:
    return BlockLocal(), torch.randn(4, 8, 12)
