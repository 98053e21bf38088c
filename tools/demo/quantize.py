"""4-bit and 6-bit weights for the demo model that stay close to the bf16 ones, in MLX affine form.

    python quantize.py BF16_FOLDER MLX_FOLDER OUT      (torch, safetensors, tokenizers, what data.py needs)

MLX_FOLDER is the plain rounding that mlx wrote, with its MTP file; OUT, which must not exist, gets the same
files with other codes, scales and biases, and with the widths of WIDTHS.

Rounding each weight to the nearest code minimizes the wrong thing. Here the columns of a matrix are
rounded one after the other, each one's error made up for by the columns still to come, as the inputs'
second moments say: GPTQ (Frantar et al., 2023). The inputs are those of the bf16 model on fresh
conversations of the training split. The distance that is printed is over conversations of the "held"
split with their right replies; the questions of models/demo/eval are of the "dev" split and play no part.

One thread and two give other sums, so there is one; another Python release has another plain text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
import net
import train

SEED = 20260
GROUP = 64
ROWS, LENGTH = 2, 512
CALIBRATION = 32  # rows
DAMP = 0.01  # of the mean second moment, added to each one
FILES = ("model.safetensors", "mtp-4bit.safetensors")
WIDTHS = (  # those of more than 4 bits; the smallest set past which more bits buy little distance
    ("lm_head", 6),
    ("v_proj", 6),
    ("o_proj", 6),
    ("linear_attn.out_proj", 6),
    ("shared_expert.down_proj", 6),
)
HELD = {  # conversations of each kind that the distance is over
    "arithmetic": 4, "compare": 2, "backwards": 4, "count_letter": 4, "copy_span": 2, "sequence": 2,
    "fact": 2, "extract": 4, "json_list": 2, "memory": 2, "arithmetic/thinking": 2,
    "count_letter/thinking": 2, "image-digit": 4, "image-number": 4, "image-shape": 4, "image-count": 6,
    "image-word": 6, "image-pair": 20, "image-larger": 4,
}  # fmt: skip


# ---------------------------------------------------------------- rounding


@dataclass
class Rounded:
    """A matrix [..., out, in] in MLX affine form: weight = code * scale + bias, a scale and a bias for
    GROUP columns of a row."""

    bits: int
    code: Tensor  # [..., out, in]
    scale: Tensor  # [..., out, in / GROUP], values that bf16 has
    bias: Tensor

    def weight(self) -> Tensor:
        parts = self.code.unflatten(-1, (-1, GROUP))
        return (parts * self.scale[..., None] + self.bias[..., None]).flatten(-2)

    def words(self) -> Tensor:
        """The codes of a row as one little-endian stream of bits, in 32-bit words."""
        code = self.code.to(torch.uint8).numpy()
        stream = (code[..., None] >> np.arange(self.bits, dtype=np.uint8)) & 1
        raw = np.packbits(stream.reshape(*code.shape[:-1], -1), axis=-1, bitorder="little")
        return torch.from_numpy(raw.view("<u4"))


def edges(w: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scale and bias of mlx's quantizer for groups [..., GROUP]: the edge of larger magnitude is exact
    and zero is a code."""
    low, high = w.amin(-1), w.amax(-1)
    scale = ((high - low) / top).clamp(min=1e-7)
    side = low.abs() > high.abs()
    scale = torch.where(side, scale, -scale)
    edge = torch.where(side, low, high)
    at = (edge / scale).round()
    scale = torch.where(at == 0, scale, edge / torch.where(at == 0, torch.ones_like(at), at))
    return scale, torch.where(at == 0, torch.zeros_like(edge), edge)


def least_squares(w: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scale and bias of groups [..., GROUP], as bf16 has them, by shrinking the range and then fitting
    both to the codes."""
    scale, bias = edges(w, top)
    middle = bias + scale * top / 2
    best = [scale.clone(), bias.clone(), torch.full_like(scale, torch.inf)]
    for shrink in (1.0, 0.94, 0.88, 0.82):
        s, b = scale * shrink, middle - scale * shrink * top / 2
        for _ in range(2):
            s, b = s.bfloat16().float(), b.bfloat16().float()
            q = ((w - b[..., None]) / s[..., None]).round().clamp(0, top)
            error = ((q * s[..., None] + b[..., None] - w) ** 2).sum(-1)
            better = error < best[2]
            for kept, new in zip(best, (s, b, error)):
                kept[better] = new[better]
            mean_q, mean_w = q.mean(-1), w.mean(-1)
            spread = ((q - mean_q[..., None]) ** 2).sum(-1)
            slope = ((q - mean_q[..., None]) * (w - mean_w[..., None])).sum(-1) / spread.clamp(min=1e-9)
            s = torch.where((spread > 0) & (slope.abs() > 1e-9), slope, s)
            b = mean_w - s * mean_q
    return best[0], best[1]


def error_feedback(weight: Tensor, second: Tensor | None, bits: int) -> Rounded:
    """Rounds [..., out, in] by the second moments [..., in, in] of its inputs; without any, each weight
    goes to the nearest code."""
    w, top = weight.clone(), (1 << bits) - 1
    size = w.shape[-1]
    second = torch.eye(size) if second is None else second
    diagonal = second.diagonal(dim1=-2, dim2=-1)
    damp = DAMP * diagonal.mean(-1, keepdim=True) + 1e-8
    inverse = np.linalg.inv((second + torch.diag_embed(damp.expand(diagonal.shape))).double().numpy())
    upper = torch.from_numpy(np.linalg.cholesky((inverse + inverse.swapaxes(-1, -2)) / 2)).mT.float()
    codes, errors = torch.zeros_like(w), torch.zeros_like(w[..., :GROUP])
    scales, biases = [], []
    for at in range(0, size, GROUP):
        end, block = at + GROUP, w[..., at : at + GROUP]
        scale, bias = least_squares(block, top)
        for j in range(GROUP):
            code = ((block[..., j] - bias) / scale).round().clamp(0, top)
            error = (block[..., j] - code * scale - bias) / upper[..., at + j, at + j, None]
            block[..., j + 1 :] -= error[..., None] * upper[..., at + j, None, at + j + 1 : end]
            codes[..., at + j], errors[..., j] = code, error
        w[..., end:] -= errors @ upper[..., at:end, end:]
        scales.append(scale)
        biases.append(bias)
    return Rounded(bits, codes, torch.stack(scales, -1), torch.stack(biases, -1))


# ---------------------------------------------------------------- inputs


class Moments:
    """Second moments of the inputs of a model's matrices, by parameter name, while it runs."""

    def __init__(self, model: nn.Module) -> None:
        self.sums: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, x, key=f"{name}.weight": self.add(key, x[0]))
            elif isinstance(module, net.Experts):
                module.register_forward_pre_hook(lambda m, x, key=name: self.experts(m, key, *x))

    def add(self, key: str, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        self.sums[key] = self.sums.get(key, 0) + x.mT @ x
        if key.endswith("shared_expert_gate.weight"):  # the router, no module of its own, sees the same
            self.sums[key.replace("shared_expert_gate", "gate")] = self.sums[key]

    def experts(self, module: net.Experts, key: str, x: Tensor, weights: Tensor) -> None:
        """Inputs of an expert count by the square of its share in the token's answer."""
        chosen: list[list[Tensor]] = [[], []]
        for e, own in enumerate(weights.t()):
            picked = own > 0
            mine, share = x[picked], own[picked, None]
            gate, up = (mine @ module.gate_up_proj[e].mT).chunk(2, -1)
            for out, y in zip(chosen, (mine * share, F.silu(gate) * up * share)):
                out.append(y.mT @ y)
        for part, sums in zip(("gate_up_proj", "down_proj"), chosen):
            self.sums[f"{key}.{part}"] = self.sums.get(f"{key}.{part}", 0) + torch.stack(sums)


def corpus(encoder: data.Encoder) -> np.ndarray:
    """Plain text: every eighth file of Python's own library."""
    ids = [encoder.ids(text) + [encoder.end] for text in list(data.stdlib_sources())[::8]]
    return np.concatenate([np.asarray(i, np.uint16) for i in ids])


def to_rows(packed: dict[str, np.ndarray]) -> net.Rows:
    """Rows on the CPU; unused picture slots are left out."""
    used = max(1, int((packed["grid"] < len(data.GRIDS)).sum()))
    order = np.argsort(packed["grid"] == len(data.GRIDS), kind="stable")[:used]
    packed |= {k: packed[k][order] for k in ("pixels", "grid", "slot")}
    return train.to_rows({k: torch.from_numpy(v) for k, v in packed.items()}, torch.device("cpu"))


def hidden(model: net.Demo, rows: net.Rows) -> list[Tensor]:
    """Last hidden states [B, T, hidden] of the model and of one draft step after it."""
    rope, mask = model.rope(rows.position), model.mask(rows)
    out = model.trunk(rows, rope, mask)
    return [out.hidden, model.draft(out.hidden, train.ahead(out.embeds, 1), rope, mask)[0]]


@torch.no_grad()
def moments(source: Path, packer: data.Packer) -> dict[str, Tensor]:
    model = load(source)
    seen = Moments(model)
    for _ in range(CALIBRATION // ROWS):
        model.lm_head(hidden(model, to_rows(packer.batch(ROWS)))[0])
    return seen.sums


# ---------------------------------------------------------------- distance


class Held:
    """Right replies of the "held" split, and what the bf16 model says along them."""

    def __init__(self, teacher: net.Demo, encoder: data.Encoder) -> None:
        self.rows, self.kinds = [], []
        for docs, kinds in zip(*train.validation_rows(encoder, LENGTH, "held", HELD)):
            self.rows.append(to_rows(data.pack([docs], LENGTH)))
            self.kinds.append(kinds)
        self.wanted = [self.at_replies(teacher, rows) for rows in self.rows]

    @staticmethod
    @torch.no_grad()
    def at_replies(model: net.Demo, rows: net.Rows) -> list[Tensor]:
        """Log-probabilities at the replies' tokens: the model's, and the first draft's."""
        live = train.ahead(rows.target, 1) > 0
        return [model.lm_head(h[live]).log_softmax(-1) for h in hidden(model, rows)]

    def distance(self, model: net.Demo) -> dict[str, list[float]]:
        """By kind of question: mean divergence in nats, share of tokens with another best one, and the
        same of the first draft."""
        sums: dict[str, Tensor] = {}
        for rows, kinds, wanted in zip(self.rows, self.kinds, self.wanted):
            columns = [torch.ones(len(wanted[0]))]
            for t, s in zip(wanted, self.at_replies(model, rows)):
                columns += [(t.exp() * (t - s)).sum(-1), (t.argmax(-1) != s.argmax(-1)).float()]
            values = torch.stack(columns)
            doc = rows.doc[train.ahead(rows.target, 1) > 0]
            for j, kind in enumerate(kinds):
                group = "pairs" if kind == "image-pair" else "pictures" if "image" in kind else "text"
                for key in (group, "all"):
                    sums[key] = sums.get(key, 0) + values[:, doc == j].double().sum(1)
        return {key: (v[1:] / v[0]).tolist() for key, v in sorted(sums.items())}


# ---------------------------------------------------------------- the run


def load(folder: Path) -> net.Demo:
    model = net.Demo(net.Config(), data.GRIDS)
    train.load_weights(model, folder)
    return model.requires_grad_(False).eval()


def own_name(base: str) -> tuple[str, slice]:
    """Parameter of net.Demo that holds an MLX module, and which of its rows (of experts)."""
    name = base.replace("language_model.model.", "model.language_model.")
    name = name.replace("language_model.lm_head", "lm_head")
    half = net.Config().moe
    for part, rows in (("gate_proj", slice(0, half)), ("up_proj", slice(half, 2 * half))):
        if name.endswith(f"switch_mlp.{part}"):
            return name.replace(f"switch_mlp.{part}", "experts.gate_up_proj"), rows
    if name.endswith("switch_mlp.down_proj"):
        return name.replace("switch_mlp", "experts"), slice(None)
    return name + ".weight", slice(None)


def modules(tensors: dict[str, Tensor]) -> Iterator[tuple[str, int]]:
    """Quantized modules of an MLX file, and the bits that each one has there."""
    for name in sorted(tensors):
        if name.endswith(".scales"):
            base = name.removesuffix(".scales")
            yield base, tensors[f"{base}.weight"].shape[-1] * 32 // (tensors[name].shape[-1] * GROUP)


def width(base: str, plain: int) -> int:
    """Bits of a module that plain rounding gives `plain` ones; the MTP file has the bits of its name."""
    if plain != 4 or base.startswith("mtp."):
        return plain
    return next((bits for suffix, bits in WIDTHS if base.endswith(suffix)), plain)


def put(model: net.Demo, base: str, rounded: Rounded) -> None:
    name, rows = own_name(base)
    model.get_parameter(name).data[..., rows, :] = rounded.weight()


def write_tables(out: Path, widths: dict[str, int], size: int) -> None:
    """Widths into config.json, the size of the tensors into the index."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    for key in ("quantization", "quantization_config"):
        config[key] |= {base: {"group_size": GROUP, "bits": bits} for base, bits in widths.items()}
    path.write_text(json.dumps(config, indent=4) + "\n")
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] = size
    path.write_text(json.dumps(index, indent=4) + "\n")


def main() -> None:
    from safetensors.torch import load_file, save_file

    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("source", type=Path)
    ap.add_argument("plain", type=Path)
    ap.add_argument("out", type=Path)
    a = ap.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    encoder = data.Encoder(a.source / "tokenizer.json")
    seconds = moments(a.source, data.Packer(encoder, corpus(encoder), LENGTH, SEED))
    teacher, model = load(a.source), load(a.source)
    shutil.copytree(a.plain, a.out, ignore=shutil.ignore_patterns("*.safetensors"))
    wider: dict[str, int] = {}
    for file in FILES:
        tensors = load_file(a.plain / file)
        for base, plain in list(modules(tensors)):
            name, rows = own_name(base)
            bits = width(base, plain)
            rounded = error_feedback(teacher.get_parameter(name)[..., rows, :], seconds.get(name), bits)
            put(model, base, rounded)
            tensors[f"{base}.weight"] = rounded.words()
            tensors[f"{base}.scales"] = rounded.scale.bfloat16()
            tensors[f"{base}.biases"] = rounded.bias.bfloat16()
            if bits != plain:
                wider[base] = bits
        save_file(tensors, a.out / file, metadata={"format": "mlx"})
        (a.out / file).chmod(0o644)
        if file == FILES[0]:
            write_tables(a.out, wider, sum(t.nbytes for t in tensors.values()))
    for group, values in Held(teacher, encoder).distance(model).items():
        print(group, *(f"{v:.6f}" for v in values), flush=True)


if __name__ == "__main__":
    sys.exit(main())
