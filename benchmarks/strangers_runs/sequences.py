"""Models of sequences: experts with capacities, scans, translators that are taught, odd sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.strangers_runs.catalogue import Made, ids, stranger


class TopTwo(nn.Module):
    """GShard's: the two best experts of each token, their places by a running count, what is too much dropped."""

    def __init__(self, wide: int = 12, experts: int = 4, capacity: int = 10) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.gate = nn.Linear(wide, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, wide, 24) / math.sqrt(wide))
        self.down = nn.Parameter(torch.randn(experts, 24, wide) / math.sqrt(24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.size(-1))
        probs = F.softmax(self.gate(tokens), dim=-1, dtype=torch.float32)
        values, chosen = torch.topk(probs, 2, dim=-1)
        values = values / values.sum(-1, keepdim=True)
        first = F.one_hot(chosen[:, 0], self.experts).float()
        second = F.one_hot(chosen[:, 1], self.experts).float()
        at_first = (torch.cumsum(first, 0) - 1) * first
        at_second = (torch.cumsum(second, 0) - 1 + first.sum(0, keepdim=True)) * second
        combine = torch.zeros(tokens.size(0), self.experts, self.capacity, device=x.device)
        for mask, at, value in ((first, at_first, values[:, 0]), (second, at_second, values[:, 1])):
            kept = mask * (at < self.capacity)
            slot = F.one_hot((at * kept).sum(-1).long(), self.capacity).float()
            combine = combine + value[:, None, None] * kept[:, :, None] * slot[:, None, :]
        dispatch = combine.bool().float()
        inside = torch.einsum("tec,td->ecd", dispatch, tokens)
        out = torch.bmm(F.silu(torch.bmm(inside, self.up)), self.down)
        found = torch.einsum("tec,ecd->td", combine, out).reshape(x.shape)
        balance = self.experts * (probs.mean(0) * first.mean(0)).sum()
        return x + found, balance


class MoELanguage(nn.Module):
    """Layers of it, the balance added to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(37, 12), nn.ModuleList([TopTwo() for _ in range(2)])
        self.norm = nn.LayerNorm(12)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, extra = self.embed(tokens), 0.0
        for layer in self.layers:
            x, balance = layer(x)
            extra = extra + 0.01 * balance
        logits = self.norm(x) @ self.embed.weight.T
        loss = F.cross_entropy(logits.view(-1, 37), labels.view(-1), ignore_index=-100)
        return {"loss": loss + extra, "aux": extra.detach()}


@stranger
def top_two_experts() -> Made:
    labels = ids(3, 5, below=37)
    labels[0, :2] = -100
    return MoELanguage(), {"tokens": ids(3, 5, below=37), "labels": labels}


class SparseExperts(nn.Module):
    """Mixtral as people write it: a loop over experts, each given the tokens that chose it (sizes by data)."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(wide, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(wide, 16), nn.ReLU(), nn.Linear(16, wide)) for _ in "abc"]
        )

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        flat = x.view(-1, d)
        weight, chosen = torch.topk(F.softmax(self.gate(flat), -1), 2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * weight[rows, nth, None])
        return out.view(b, s, d)


@stranger
def sparse_experts() -> Made:
    return SparseExperts(), torch.randn(2, 6, 8)


class Mamba(nn.Module):
    """A selective scan written as a loop over time, a causal convolution before it, a gate after it."""

    def __init__(self, wide: int = 12, state: int = 4) -> None:
        super().__init__()
        inner = 2 * wide
        self.in_proj, self.conv1d = (
            nn.Linear(wide, 2 * inner, bias=False),
            nn.Conv1d(inner, inner, 3, padding=2, groups=inner),
        )
        self.x_proj, self.dt_proj = nn.Linear(inner, 2 + 2 * state, bias=False), nn.Linear(2, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float().repeat(inner, 1)))
        self.D, self.out_proj = nn.Parameter(torch.ones(inner)), nn.Linear(inner, wide, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.size(1)
        x, z = self.in_proj(hidden).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        dt, B, C = torch.split(self.x_proj(x), [2, 4, 4], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        decay = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.A_log.float()))
        drive = dt.unsqueeze(-1) * B.unsqueeze(2) * x.unsqueeze(-1)
        state, ys = torch.zeros_like(drive[:, 0]), []
        for t in range(length):
            state = decay[:, t] * state + drive[:, t]
            ys.append((state * C[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(ys, dim=1) + x * self.D
        return hidden + self.out_proj(y * F.silu(z))


@stranger
def mamba() -> Made:
    return nn.Sequential(nn.Embedding(29, 12), Mamba(), nn.RMSNorm(12), nn.Linear(12, 29, bias=False)), ids(
        4, 7, below=29
    )


class RWKV(nn.Module):
    """A token mixed with the one before it, a running numerator and denominator under a running maximum."""

    def __init__(self, wide: int = 12) -> None:
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.mix = nn.ParameterList([nn.Parameter(torch.rand(1, 1, wide)) for _ in range(3)])
        self.key, self.value, self.receptance = (nn.Linear(wide, wide, bias=False) for _ in range(3))
        self.decay, self.first = nn.Parameter(torch.rand(wide)), nn.Parameter(torch.rand(wide))

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.time_shift(x)
        k, v, r = (
            lin(x * m + shifted * (1 - m))
            for lin, m in zip((self.key, self.value, self.receptance), self.mix, strict=True)
        )
        num = den = torch.zeros_like(x[:, 0])
        top, out, w = torch.full_like(num, -1e38), [], -torch.exp(self.decay)
        for t in range(x.size(1)):
            kt, vt = k[:, t], v[:, t]
            most = torch.maximum(top, self.first + kt)
            a, b = torch.exp(top - most), torch.exp(self.first + kt - most)
            out.append((a * num + b * vt) / (a * den + b))
            most = torch.maximum(top + w, kt)
            a, b = torch.exp(top + w - most), torch.exp(kt - most)
            num, den, top = a * num + b * vt, a * den + b, most
        return x + torch.sigmoid(r) * torch.stack(out, 1)


@stranger
def rwkv() -> Made:
    return nn.Sequential(RWKV(), nn.LayerNorm(12), RWKV()), torch.randn(4, 5, 12)


class Translator(nn.Module):
    """Sutskever's with Bahdanau's attention: cells in a loop, taught by the target or by itself as a list says."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(31, 12), nn.Embedding(23, 12)
        self.encoder = nn.LSTM(12, 10, num_layers=2, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(20, 14)
        self.cell, self.score = nn.LSTMCell(12 + 20, 14), nn.Linear(14 + 20, 1)
        self.out = nn.Linear(14, 23)
        self.teacher = [True, True, False, True, False]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen, (h, _) = self.encoder(self.source(source))
        hidden = torch.tanh(self.bridge(torch.cat([h[-2], h[-1]], dim=1)))
        cell, token, logits = torch.zeros_like(hidden), target[:, 0], []
        for t in range(1, target.size(1)):
            both = torch.cat([hidden.unsqueeze(1).expand(-1, seen.size(1), -1), seen], dim=-1)
            weight = F.softmax(self.score(both).squeeze(-1).masked_fill(source == 0, -1e9), dim=-1)
            context = torch.bmm(weight.unsqueeze(1), seen).squeeze(1)
            hidden, cell = self.cell(torch.cat([self.target(token), context], dim=1), (hidden, cell))
            logits.append(self.out(hidden))
            token = target[:, t] if self.teacher[t - 1] else logits[-1].argmax(-1)
        return F.cross_entropy(torch.stack(logits, 1).transpose(1, 2), target[:, 1:])


@stranger
def translator() -> Made:
    source = torch.randint(1, 31, (4, 6))
    source[1, 4:] = 0
    return Translator(), (source, ids(4, 6, below=23))


class PackedGRU(nn.Module):
    """Sequences of unequal lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.fc = nn.Embedding(20, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.gru(packed)
        return self.fc(h[-1])


@stranger
def packed_gru() -> Made:
    return PackedGRU(), (ids(4, 6, below=20), torch.tensor([6, 3, 5, 2]))


@dataclass
class Config:
    """What a transformer is, as configs say it."""

    vocab_size: int = 101
    hidden_size: int = 48
    num_heads: int = 3
    num_layers: int = 2
    intermediate_size: int = 100
    tie: bool = True
    checkpoint: bool = False
    num_labels: int = 5


@dataclass
class CausalOutput:
    """A loss where there are labels, and logits."""

    loss: Tensor | None
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class Layer(nn.Module):
    """Pre-norm, queries and keys normed by head, a mask of the batch joined with a causal one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.head = config, config.hidden_size // config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = nn.RMSNorm(self.head), nn.RMSNorm(self.head)
        self.ln_1, self.ln_2 = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size, bias=False)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, w = x.shape
        h = self.ln_1(x)
        q, k, v = (p(h).view(b, s, -1, self.head).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        h = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=mask)
        x = x + self.o_proj(h.transpose(1, 2).contiguous().view(b, s, w))
        return x + self.fc2(F.gelu(self.fc1(self.ln_2(x)), approximate="tanh"))


class Causal(nn.Module):
    """Masks built in forward, labels shifted inside, the output a dataclass."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(64, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> CausalOutput:
        s = input_ids.shape[1]
        causal = torch.full((s, s), float("-inf"), device=input_ids.device).triu(1)
        if attention_mask is not None:
            padding = (1.0 - attention_mask[:, None, None, :].to(causal.dtype)) * torch.finfo(causal.dtype).min
            causal = torch.clamp(causal[None, None] + padding, min=torch.finfo(causal.dtype).min)
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        else:
            positions = torch.arange(s, device=input_ids.device).unsqueeze(0)
        x = self.embed_tokens(input_ids) * math.sqrt(self.config.hidden_size) + self.embed_positions(positions)
        hidden: list[Tensor] = []
        for layer in self.layers:
            x = checkpoint(layer, x, causal, use_reentrant=False) if self.config.checkpoint else layer(x, causal)
            hidden.append(x)
        logits, loss = self.lm_head(self.norm(x)), None
        if labels is not None:
            shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            loss = F.cross_entropy(shift_logits.view(-1, self.config.vocab_size), shift_labels.view(-1))
        return CausalOutput(loss, logits, tuple(hidden))


def _batch() -> dict[str, Tensor]:
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1, :2], mask[3, :3] = 0, 0
    tokens = ids(4, 7, below=101)
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


@stranger
def odd_transformer() -> Made:
    return Causal(Config()), _batch()


@stranger
def odd_transformer_untied_checkpointed() -> Made:
    return Causal(Config(tie=False, checkpoint=True)), _batch()


@stranger
def odd_transformer_without_labels() -> Made:
    return Causal(Config(num_heads=3, hidden_size=39, intermediate_size=77)), ids(3, 5, below=101)


class CheckpointedSequence(nn.Module):
    """``checkpoint_sequential``, and a branch that is run twice, once checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)])
        self.twice = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(self.body, 2, x, use_reentrant=False)
        return checkpoint(lambda h: F.silu(self.twice(h)) + h, self.twice(x), use_reentrant=False)  # type: ignore[no-any-return]


@stranger
def checkpointed_sequence() -> Made:
    return CheckpointedSequence(), torch.randn(6, 12)
