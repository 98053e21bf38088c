"""The vision tower."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import Config, NEG, rotate


class VisionAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.v_heads
        self.qkv = nn.Linear(c.v_hidden, 3 * c.v_hidden)
        self.proj = nn.Linear(c.v_hidden, c.v_hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        n, p, d = x.shape
        q, k, v = self.qkv(x).view(n, p, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q = rotate(q.float(), cos, sin).type_as(v)
        k = rotate(k.float(), cos, sin).type_as(v)
        scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5)
        probs = scores.masked_fill(~mask, NEG).softmax(-1).type_as(v)
        return self.proj((probs @ v).transpose(1, 2).reshape(n, p, d))


class VisionMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(c.v_hidden, c.v_mlp)
        self.linear_fc2 = nn.Linear(c.v_mlp, c.v_hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.v_hidden, eps=1e-6)
        self.norm2 = nn.LayerNorm(c.v_hidden, eps=1e-6)
        self.attn = VisionAttention(c)
        self.mlp = VisionMLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class PatchProjection(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        fan_in = 3 * c.temporal * c.patch * c.patch
        shape = (c.v_hidden, 3, c.temporal, c.patch, c.patch)
        self.weight = nn.Parameter(torch.empty(shape).normal_(std=fan_in**-0.5))
        self.bias = nn.Parameter(torch.zeros(c.v_hidden))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 3 * patch * patch], one frame: both temporal slices see the same pixels."""
        return F.linear(x, self.weight.sum(2).flatten(1), self.bias)


class PatchEmbed(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.proj = PatchProjection(c)


class PatchMerger(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        wide = c.v_hidden * c.merge * c.merge
        self.norm = nn.LayerNorm(c.v_hidden, eps=1e-6)
        self.linear_fc1 = nn.Linear(wide, wide)
        self.linear_fc2 = nn.Linear(wide, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        n, p, d = x.shape
        x = self.norm(x).view(n, p // 4, 4 * d)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


def vision_tables(c: Config, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """For a grid of patches in merge order: resampling weights of the learned position
    grid [P, v_grid^2] (bilinear, corners aligned) and (row, column) of each patch [P, 2]."""
    gh, gw = grid

    def axis(n: int) -> Tensor:
        at = torch.linspace(0, c.v_grid - 1, n, dtype=torch.float32)
        low = at.floor().long()
        high = (low + 1).clamp(max=c.v_grid - 1)
        part = (at - low).unsqueeze(1)
        table = torch.zeros(n, c.v_grid)
        table.scatter_add_(1, low.unsqueeze(1), 1 - part)
        return table.scatter_add_(1, high.unsqueeze(1), part)

    rows, cols = axis(gh), axis(gw)
    both = (rows[:, None, :, None] * cols[None, :, None, :]).reshape(gh, gw, -1)
    place = torch.stack(torch.meshgrid(torch.arange(gh), torch.arange(gw), indexing="ij"), -1)
    m = c.merge

    def order(x: Tensor) -> Tensor:
        return x.view(gh // m, m, gw // m, m, -1).permute(0, 2, 1, 3, 4).reshape(gh * gw, -1)

    return order(both), order(place)


class Vision(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.patch_embed = PatchEmbed(c)
        self.pos_embed = nn.Embedding(c.v_grid * c.v_grid, c.v_hidden)
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c.v_depth))
        self.merger = PatchMerger(c)

    def forward(self, pixels: Tensor, resample: Tensor, place: Tensor, live: Tensor) -> Tensor:
        """pixels [N, P, 3*16*16] in [-1, 1]; resample [N, P, v_grid^2]; place [N, P, 2];
        live [N, P]. Returns merged tokens [N, P / 4, hidden]."""
        c = self.c
        x = self.patch_embed.proj(pixels) + resample.to(pixels.dtype) @ self.pos_embed.weight.to(pixels.dtype)
        dim = c.v_hidden // c.v_heads // 2
        freq = c.v_theta ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
        angle = (place.float().unsqueeze(-1) * freq).flatten(-2)
        angle = torch.cat([angle, angle], -1).unsqueeze(1)
        cos, sin = angle.cos(), angle.sin()
        mask = live[:, None, None, :]
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.merger(x)
