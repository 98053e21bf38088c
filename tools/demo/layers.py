"""The layers of the text model, and the sizes of the whole network."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RESET = -30.0  # log-decay that forgets the previous document: exp(-30) ~ 1e-13
NEG = -1e30


@dataclass(frozen=True)
class Config:
    vocab: int = 3072
    hidden: int = 256
    layers: int = 8
    attention_every: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 256
    rotary: int = 64
    mrope: tuple[int, int, int] = (11, 11, 10)
    theta: float = 1e7
    gdn_k_heads: int = 2
    gdn_v_heads: int = 4
    gdn_dim: int = 128
    conv: int = 4
    chunk: int = 64
    experts: int = 12
    top_k: int = 4
    moe: int = 128
    shared: int = 128
    eps: float = 1e-6
    v_depth: int = 3
    v_hidden: int = 128
    v_heads: int = 2
    v_mlp: int = 512
    v_grid: int = 16
    patch: int = 16
    temporal: int = 2
    merge: int = 2
    v_theta: float = 1e4


class RMSNorm(nn.Module):
    """Zero-centred weight: x / rms(x) * (1 + w)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class GatedNorm(nn.Module):
    """w * x / rms(x) * silu(gate)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.float() * y * F.silu(gate.float())


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower L [..., 64, 64]: 16x16 blocks, then merged twice."""

    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:  # type: ignore[override]
        size = lower.shape[-1]
        step = min(16, size)
        eye = torch.eye(step, device=lower.device, dtype=lower.dtype)
        inverses = []
        for at in range(0, size, step):
            block = lower[..., at : at + step, at : at + step]
            inv = eye - block
            power = block @ block
            inv = inv + inv @ power
            power = power @ power
            inv = inv + inv @ power
            power = power @ power
            inverses.append(inv + inv @ power)
        while len(inverses) > 1:
            merged = []
            for i in range(0, len(inverses), 2):
                top, bottom = inverses[i], inverses[i + 1]
                at = i * step
                cross = lower[..., at + step : at + 2 * step, at : at + step]
                corner = -(bottom @ cross @ top)
                upper = torch.cat([top, torch.zeros_like(top)], -1)
                merged.append(torch.cat([upper, torch.cat([corner, bottom], -1)], -2))
            inverses = merged
            step *= 2
        ctx.save_for_backward(inverses[0])
        return inverses[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inv,) = ctx.saved_tensors
        inv_t = inv.transpose(-1, -2)
        return -(inv_t @ grad @ inv_t).tril(-1)


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """Chunked gated delta rule in float32. q, k, v: [B, H, T, D]; g, beta: [B, H, T]."""
    b, h, t, d = v.shape
    n = t // chunk
    q = (l2norm(q.float()) * (q.shape[-1] ** -0.5)).view(b * h, n, chunk, -1)
    k = l2norm(k.float()).view(b * h, n, chunk, -1)
    v = v.float().view(b * h, n, chunk, d)
    beta = beta.float().view(b * h, n, chunk, 1)
    cum = g.float().view(b * h, n, chunk).cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill(~causal, NEG).exp()
    k_t = k.transpose(-1, -2)
    lower = ((beta * k) @ k_t * decay).tril(-1)
    inverse = UnitLowerInverse.apply(lower)
    grow = cum.exp().unsqueeze(-1)
    u = inverse @ (beta * v)
    w = inverse @ (beta * grow * k)
    inner = (q @ k_t) * decay
    q_in = q * grow
    k_out = (k * (cum[..., -1:] - cum).exp().unsqueeze(-1)).transpose(-1, -2)
    fade = cum[..., -1].exp()[..., None, None]
    state = torch.zeros(b * h, k.shape[-1], d, device=v.device, dtype=torch.float32)
    news, states = [], []
    for i in range(n):
        states.append(state)
        new = torch.baddbmm(u[:, i], w[:, i], state, alpha=-1)
        news.append(new)
        if i + 1 < n:
            state = torch.baddbmm(state * fade[:, i], k_out[:, i], new)
    out = q_in @ torch.stack(states, 1) + inner @ torch.stack(news, 1)
    return out.view(b, h, t, d)


class DepthwiseConv(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, width).uniform_(-0.5, 0.5))

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        """x [B, T, C]; depth [B, T]: distance of each token from its document's start."""
        width = self.weight.shape[-1]
        taps = self.weight.squeeze(1).to(x.dtype)
        y = x * taps[:, width - 1]
        for back in range(1, width):
            past = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
            y = y + past * (depth >= back).unsqueeze(-1) * taps[:, width - 1 - back]
        return F.silu(y)


class GatedDeltaNet(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.key, self.value = c.gdn_k_heads * c.gdn_dim, c.gdn_v_heads * c.gdn_dim
        self.in_proj_qkv = nn.Linear(c.hidden, 2 * self.key + self.value, bias=False)
        self.in_proj_z = nn.Linear(c.hidden, self.value, bias=False)
        self.in_proj_b = nn.Linear(c.hidden, c.gdn_v_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden, c.gdn_v_heads, bias=False)
        self.conv1d = DepthwiseConv(2 * self.key + self.value, c.conv)
        # Decay per token between about 0.5 and 0.999 at the start of training.
        rate = torch.exp(torch.linspace(math.log(0.02), math.log(4.0), c.gdn_v_heads))
        self.A_log = nn.Parameter(torch.log(rate))
        self.dt_bias = nn.Parameter(torch.full((c.gdn_v_heads,), -1.0))
        self.norm = GatedNorm(c.gdn_dim, c.eps)
        self.out_proj = nn.Linear(self.value, c.hidden, bias=False)

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        c = self.c
        b, t, _ = x.shape
        mixed = self.conv1d(self.in_proj_qkv(x), depth)
        q, k, v = mixed.split([self.key, self.key, self.value], -1)
        rep = c.gdn_v_heads // c.gdn_k_heads

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(b, t, heads, c.gdn_dim).transpose(1, 2)

        q = split(q, c.gdn_k_heads).repeat_interleave(rep, 1)
        k = split(k, c.gdn_k_heads).repeat_interleave(rep, 1)
        v = split(v, c.gdn_v_heads).contiguous()
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2).contiguous()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        g = g.masked_fill((depth == 0).unsqueeze(-1), RESET).transpose(1, 2).contiguous()
        with torch.autocast(x.device.type, enabled=False):
            y = gated_delta_rule(q, k, v, g, beta, c.chunk)
        y = self.norm(y.transpose(1, 2), self.in_proj_z(x).view(b, t, -1, c.gdn_dim))
        return self.out_proj(y.reshape(b, t, -1).type_as(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first `cos.shape[-1]` dims of x [B, H, T, D]; cos, sin: [B, 1, T, R]."""
    r = cos.shape[-1]
    head, tail = x[..., :r], x[..., r:]
    a, b = head.chunk(2, -1)
    turned = torch.cat([-b, a], -1)
    return torch.cat([head * cos + turned * sin, tail], -1)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden, 2 * c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.eps)
        self.k_norm = RMSNorm(c.head_dim, c.eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        prior: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`prior[0]` are keys and values to attend to under `mask`; later entries, and this
        call's own keys and values, are seen position by position (chained MTP drafts)."""
        c = self.c
        b, t, _ = x.shape
        q, gate = self.q_proj(x).view(b, t, c.heads, 2 * c.head_dim).chunk(2, -1)
        q = rotate(self.q_norm(q).transpose(1, 2), *rope)
        k = rotate(self.k_norm(self.k_proj(x).view(b, t, c.kv_heads, c.head_dim)).transpose(1, 2), *rope)
        v = self.v_proj(x).view(b, t, c.kv_heads, c.head_dim).transpose(1, 2)
        rep = c.heads // c.kv_heads
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        scale = c.head_dim**-0.5
        chain = [] if prior is None else [*prior[1:], (k, v)]
        base_k, base_v = (k, v) if prior is None else prior[0]
        scores = [((q @ base_k.transpose(-1, -2)).float() * scale).masked_fill(~mask, NEG)]
        scores += [((q.float() * own.float()).sum(-1, keepdim=True) * scale) for own, _ in chain]
        p = torch.cat(scores, -1).softmax(-1) if chain else scores[0].softmax(-1)
        y = p[..., :t].type_as(v) @ base_v
        for i, (_, own_v) in enumerate(chain):
            y = y + p[..., t + i : t + i + 1].type_as(v) * own_v
        y = y.transpose(1, 2).reshape(b, t, -1) * gate.reshape(b, t, -1).sigmoid()
        return self.o_proj(y), (k, v)


class Experts(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(c.experts, 2 * c.moe, c.hidden))
        self.down_proj = nn.Parameter(torch.empty(c.experts, c.hidden, c.moe))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        n, e = weights.shape
        dtype = (
            torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        )
        up_w = self.gate_up_proj.to(dtype)
        hidden = (x.to(dtype) @ up_w.flatten(0, 1).t()).view(n, e, -1)
        gate, up = hidden.chunk(2, -1)
        act = F.silu(gate) * up * weights.unsqueeze(-1).to(dtype)
        down = self.down_proj.to(dtype).permute(0, 2, 1).flatten(0, 1)
        return act.flatten(1) @ down


class Router(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.experts, c.hidden).normal_(std=0.02))


class SharedExpert(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.shared, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.shared, bias=False)
        self.down_proj = nn.Linear(c.shared, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.gate = Router(c)
        self.experts = Experts(c)
        self.shared_expert = SharedExpert(c)
        self.shared_expert_gate = nn.Linear(c.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.c
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            probs = (flat.float() @ self.gate.weight.float().t()).softmax(-1)
        top, index = probs.topk(c.top_k, -1)
        weights = torch.zeros_like(probs).scatter(-1, index, top / top.sum(-1, keepdim=True))
        share = (weights > 0).float().mean(0)
        balance = (share * probs.mean(0)).sum() * c.experts / c.top_k
        y = self.experts(flat, weights) + self.shared_expert_gate(flat).sigmoid() * self.shared_expert(flat)
        return y.view_as(x), balance


class DecoderLayer(nn.Module):
    def __init__(self, c: Config, attention: bool) -> None:
        super().__init__()
        self.attention = attention
        if attention:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp = MoE(c)
        self.input_layernorm = RMSNorm(c.hidden, c.eps)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.eps)

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + y, balance

    def linear(self, x: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        return self.feed_forward(x + self.linear_attn(self.input_layernorm(x), depth))

    def full(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        prior: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        y, kv = self.self_attn(self.input_layernorm(x), rope, mask, prior)
        x, balance = self.feed_forward(x + y)
        return x, balance, kv
