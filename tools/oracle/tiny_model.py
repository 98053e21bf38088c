"""Sizes, weights, prompts and pictures of the tiny models."""

from __future__ import annotations

import json
import math
import pathlib
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Preset:
    """Dimensions and habits of one tiny model."""

    seed: int
    layers: int
    interval: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mrope: tuple[int, int, int]
    theta: float
    k_heads: int
    v_heads: int
    linear_dim: int
    experts: int
    top_k: int
    moe_size: int
    shared_size: int
    tied: bool
    vision_hidden: int
    vision_heads: int
    vision_mlp: int
    patch: int
    table_side: int
    image_sizes: tuple[tuple[int, int], ...]  # width, height
    residual_gain: float = 1.0  # scale of what each sublayer adds
    mtp_copy: float = 0.0  # strength of the next token's embedding in the MTP input
    split_mtp_experts: bool = False
    shards: int = 1
    vision_depth: int = 2
    vocab_multiple: int = 64


PRESETS: dict[str, Preset] = {
    # Random MTP layer: its drafts are nearly always rejected.
    "tiny-a": Preset(
        seed=11,
        layers=4,
        interval=4,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=64,
        mrope=(3, 3, 2),
        theta=1e7,
        k_heads=2,
        v_heads=4,
        linear_dim=16,
        experts=8,
        top_k=2,
        moe_size=16,
        shared_size=32,
        tied=False,
        vision_hidden=32,
        vision_heads=2,
        vision_mlp=48,
        patch=8,
        table_side=8,
        image_sizes=((42, 34), (24, 52)),
        residual_gain=0.5,
    ),
    # Deeper, tied, sharded, one tensor per MTP expert; its MTP layer agrees with the model often.
    "tiny-b": Preset(
        seed=41,
        layers=6,
        interval=3,
        hidden=32,
        heads=6,
        kv_heads=2,
        head_dim=32,
        mrope=(2, 1, 1),
        theta=1e4,
        k_heads=2,
        v_heads=6,
        linear_dim=16,
        experts=12,
        top_k=3,
        moe_size=8,
        shared_size=16,
        tied=True,
        vision_hidden=32,
        vision_heads=4,
        vision_mlp=64,
        patch=8,
        table_side=6,
        image_sizes=((50, 34), (32, 30)),
        residual_gain=0.3,
        mtp_copy=4.0,
        split_mtp_experts=True,
        shards=3,
    ),
    # Every matrix has an input width that is a multiple of 64: for 4-bit groups of 64.
    "tiny-q": Preset(
        seed=39,
        layers=4,
        interval=4,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=64,
        mrope=(3, 3, 2),
        theta=1e7,
        k_heads=2,
        v_heads=4,
        linear_dim=32,
        experts=16,
        top_k=4,
        moe_size=64,
        shared_size=64,
        tied=False,
        vision_hidden=64,
        vision_heads=2,
        vision_mlp=128,
        patch=8,
        table_side=8,
        image_sizes=((50, 34), (30, 77)),
        residual_gain=0.06,
        mtp_copy=5.0,
    ),
}

TEXT_PROMPT = [
    {"role": "system", "content": "Answer in one short sentence."},
    {
        "role": "user",
        "content": (
            "The yield expression is used when defining a generator function, and thus can only be used in "
            "the body of a function definition. What does the following print?\n\n"
            "for n in range(3):\n    print(n * 12, end=' ')\n"
        ),
    },
]


def image_prompt(count: int) -> list[dict]:
    """A chat turn with `count` images among its words."""
    parts: list[dict] = [{"type": "text", "text": "Here is a picture:"}]
    for n in range(count):
        parts += [
            {"type": "image"},
            {"type": "text", "text": " and the next one " if n == 0 < count - 1 else "\n"},
        ]
    parts.append({"type": "text", "text": "What do you see?"})
    return [{"role": "user", "content": parts}]


# ----------------------------------------------------------------- configuration and weights


def text_config(p: Preset, end: int, vocab: int) -> dict:
    """`text_config`; `end` is the id of the end of a text."""
    kinds = ["full_attention" if (i + 1) % p.interval == 0 else "linear_attention" for i in range(p.layers)]
    rope = {
        "mrope_interleaved": True,
        "mrope_section": list(p.mrope),
        "partial_rotary_factor": 0.25,
        "rope_theta": p.theta,
        "rope_type": "default",
    }
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "full_attention_interval": p.interval,
        "head_dim": p.head_dim,
        "hidden_act": "silu",
        "hidden_size": p.hidden,
        "initializer_range": 0.02,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": p.linear_dim,
        "linear_num_key_heads": p.k_heads,
        "linear_num_value_heads": p.v_heads,
        "linear_value_head_dim": p.linear_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": p.moe_size,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": p.heads,
        "num_experts": p.experts,
        "num_experts_per_tok": p.top_k,
        "num_hidden_layers": p.layers,
        "num_key_value_heads": p.kv_heads,
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": rope,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": p.shared_size,
        "tie_word_embeddings": p.tied,
        "use_cache": True,
        "vocab_size": vocab,
    }


def vision_config(p: Preset) -> dict:
    """`vision_config`."""
    return {
        "deepstack_visual_indexes": [],
        "depth": p.vision_depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": p.vision_hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": p.vision_mlp,
        "model_type": "qwen3_5_moe",
        "num_heads": p.vision_heads,
        "num_position_embeddings": p.table_side**2,
        "out_hidden_size": p.hidden,
        "patch_size": p.patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def make_config(p: Preset, ids: dict[str, int], vocab: int) -> dict:
    """config.json with the keys and order of the published models."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "qwen3_5_moe",
        "text_config": text_config(p, ids["<|endoftext|>"], vocab),
        "tie_word_embeddings": p.tied,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision_config(p),
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


class Weights:
    """Random tensors under the published names, in the published dtypes, drawn in the order of the calls."""

    def __init__(self, p: Preset) -> None:
        self.p = p
        self.rng = np.random.default_rng(p.seed)
        self.out: Tensors = {}

    def put(self, name: str, value: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> None:
        self.out[name] = torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32)).to(dtype)

    def normal(self, *shape: int, std: float) -> np.ndarray:
        return self.rng.standard_normal(shape) * std

    def linear(self, name: str, *shape: int, gain: float = 1.0, bias: bool = False) -> None:
        self.put(name + ".weight", self.normal(*shape, std=gain / math.sqrt(math.prod(shape[1:]))))
        if bias:
            self.put(name + ".bias", self.normal(shape[0], std=0.1))

    def norm(self, name: str, size: int, center: float = 0.0, bias: bool = False) -> None:
        self.put(name + ".weight", center + self.normal(size, std=0.15))
        if bias:
            self.put(name + ".bias", self.normal(size, std=0.1))

    def attention(self, name: str) -> None:
        p = self.p
        self.linear(name + "q_proj", 2 * p.heads * p.head_dim, p.hidden, gain=1.5)
        self.linear(name + "k_proj", p.kv_heads * p.head_dim, p.hidden)
        self.linear(name + "v_proj", p.kv_heads * p.head_dim, p.hidden)
        self.linear(name + "o_proj", p.hidden, p.heads * p.head_dim, gain=2.0 * p.residual_gain)
        self.norm(name + "q_norm", p.head_dim, 0.3)
        self.norm(name + "k_norm", p.head_dim, 0.3)

    def delta_net(self, name: str) -> None:
        p = self.p
        key, value = p.k_heads * p.linear_dim, p.v_heads * p.linear_dim
        self.linear(name + "in_proj_qkv", 2 * key + value, p.hidden)
        self.linear(name + "in_proj_z", value, p.hidden)
        self.linear(name + "in_proj_b", p.v_heads, p.hidden)
        self.linear(name + "in_proj_a", p.v_heads, p.hidden)
        self.put(name + "conv1d.weight", self.normal(2 * key + value, 1, 4, std=0.6))
        self.put(name + "dt_bias", self.rng.uniform(-5.0, 0.0, p.v_heads))
        self.put(name + "A_log", np.log(self.rng.uniform(0.2, 8.0, p.v_heads)), torch.float32)
        self.put(name + "norm.weight", 1.0 + self.normal(p.linear_dim, std=0.15), torch.float32)
        self.linear(name + "out_proj", p.hidden, value, gain=2.0 * p.residual_gain)

    def moe(self, name: str, split: bool) -> None:
        p, h = self.p, self.p.hidden
        self.linear(name + "gate", p.experts, h, gain=1.5)
        gate_up = self.normal(p.experts, 2 * p.moe_size, h, std=1.5 / math.sqrt(h))
        down = self.normal(p.experts, h, p.moe_size, std=2.0 * p.residual_gain / math.sqrt(p.moe_size))
        if split:
            for e in range(p.experts):
                self.put(f"{name}experts.{e}.gate_proj.weight", gate_up[e, : p.moe_size])
                self.put(f"{name}experts.{e}.up_proj.weight", gate_up[e, p.moe_size :])
                self.put(f"{name}experts.{e}.down_proj.weight", down[e])
        else:
            self.put(name + "experts.gate_up_proj", gate_up)
            self.put(name + "experts.down_proj", down)
        self.linear(name + "shared_expert.gate_proj", p.shared_size, h, gain=1.5)
        self.linear(name + "shared_expert.up_proj", p.shared_size, h, gain=1.5)
        self.linear(name + "shared_expert.down_proj", h, p.shared_size, gain=2.0 * p.residual_gain)
        self.linear(name + "shared_expert_gate", 1, h)

    def block(self, name: str, full: bool, split: bool = False) -> None:
        self.norm(name + "input_layernorm", self.p.hidden)
        if full:
            self.attention(name + "self_attn.")
        else:
            self.delta_net(name + "linear_attn.")
        self.norm(name + "post_attention_layernorm", self.p.hidden)
        self.moe(name + "mlp.", split)

    def text(self, vocab: int) -> None:
        p = self.p
        self.put("model.language_model.embed_tokens.weight", self.normal(vocab, p.hidden, std=0.7))
        for i in range(p.layers):
            self.block(f"model.language_model.layers.{i}.", (i + 1) % p.interval == 0)
        self.norm("model.language_model.norm", p.hidden)
        if not p.tied:
            self.linear("lm_head", vocab, p.hidden, gain=2.5)

    def tower(self) -> None:
        p = self.p
        v, m = p.vision_hidden, 4 * p.vision_hidden
        self.linear("model.visual.patch_embed.proj", v, 3, 2, p.patch, p.patch, gain=2.0, bias=True)
        self.put("model.visual.pos_embed.weight", self.normal(p.table_side**2, v, std=0.5))
        for i in range(p.vision_depth):
            b = f"model.visual.blocks.{i}."
            self.norm(b + "norm1", v, 1.0, bias=True)
            self.norm(b + "norm2", v, 1.0, bias=True)
            self.linear(b + "attn.qkv", 3 * v, v, gain=1.5, bias=True)
            self.linear(b + "attn.proj", v, v, bias=True)
            self.linear(b + "mlp.linear_fc1", p.vision_mlp, v, gain=1.5, bias=True)
            self.linear(b + "mlp.linear_fc2", v, p.vision_mlp, bias=True)
        self.norm("model.visual.merger.norm", v, 1.0, bias=True)
        self.linear("model.visual.merger.linear_fc1", m, m, gain=1.5, bias=True)
        self.linear("model.visual.merger.linear_fc2", p.hidden, m, gain=1.5, bias=True)

    def mtp(self) -> None:
        p, h = self.p, self.p.hidden
        fc = self.normal(h, 2 * h, std=0.5 / math.sqrt(h))
        fc[:, :h] += p.mtp_copy * np.eye(h)
        self.put("mtp.fc.weight", fc)
        self.norm("mtp.pre_fc_norm_embedding", h)
        self.norm("mtp.pre_fc_norm_hidden", h)
        self.block("mtp.layers.0.", True, p.split_mtp_experts)
        if p.mtp_copy:  # same last norm as the model, so that the drafts can agree with it
            self.put("mtp.norm.weight", self.out["model.language_model.norm.weight"].float().numpy())
        else:
            self.norm("mtp.norm", h)


def make_weights(p: Preset, vocab: int) -> Tensors:
    """All tensors of a model with `vocab` tokens."""
    weights = Weights(p)
    weights.text(vocab)
    weights.tower()
    weights.mtp()
    return weights.out


def write_weights(folder: pathlib.Path, weights: Tensors, shards: int) -> None:
    """One file, or `shards` files with an index."""
    meta = {"format": "pt"}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata=meta)
        return
    total = sum(t.numel() * t.element_size() for t in weights.values())
    groups: list[Tensors] = [{} for _ in range(shards)]
    done = 0
    for name, t in weights.items():
        groups[min(done * shards // total, shards - 1)][name] = t
        done += t.numel() * t.element_size()
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    for file, group in zip(files, groups, strict=True):
        save_file(group, folder / file, metadata=meta)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")


def draw_image(path: pathlib.Path, size: tuple[int, int], seed: int) -> None:
    """A small picture with a colour ramp and a few shapes."""
    w, h = size
    y, x = np.mgrid[0:h, 0:w]
    ramp = np.stack(
        [255 * x // max(w - 1, 1), 255 * y // max(h - 1, 1), (x * 3 + y * 5 + 40 * seed) % 256], -1
    )
    image = Image.fromarray(ramp.astype(np.uint8), "RGB")
    pen = ImageDraw.Draw(image)
    pen.ellipse((w // 5, h // 5, w // 2, h // 2), fill=(240, 30, 60 + seed))
    pen.rectangle((w // 2, h // 2, w - 4, h - 6), outline=(10, 10, 10), width=2)
    image.save(path, optimize=True)
