"""The tiny models in transformers, in double precision."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

from tiny_model import Tensors

# ----------------------------------------------------------------- transformers runs


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """While active, code that asks torch for float32 gets float64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved


def load_model(config: dict, weights: Tensors, dtype: torch.dtype) -> Qwen3_5MoeForConditionalGeneration:
    """The transformers model with our weights (mtp.* left out), eager attention and experts."""
    cfg = Qwen3_5MoeConfig(**json.loads(json.dumps(config)))
    cfg._attn_implementation = "eager"
    model = Qwen3_5MoeForConditionalGeneration(cfg).to(torch.float32)  # the config's dtype would round A_log
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    state = {n: t for n, t in weights.items() if not n.startswith("mtp.")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [n for n in missing if n != "lm_head.weight"]:
        raise SystemExit(f"names differ: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(dtype).eval()


def exact_frequencies(model: Qwen3_5MoeForConditionalGeneration) -> None:
    """Recompute the rotary frequencies at the precision now in force."""
    text, vision = model.model.language_model.rotary_emb, model.model.visual.rotary_pos_emb
    text.inv_freq = text.compute_default_rope_parameters(text.config)[0]
    vision.inv_freq = vision.compute_axial_rope_parameters(vision.config)[0]


@dataclass
class Run:
    """What one prompt gave."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]  # embedding, each layer
    final: torch.Tensor
    router_logits: list[torch.Tensor]
    positions: torch.Tensor
    delta: int
    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]
    step_error: float  # prefill against one token at a time
    greedy: list[int]
    greedy_margin: float
    greedy_logits: list[torch.Tensor]  # after each greedy token
    embeds: torch.Tensor


def one_by_one_error(model, embeds: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> float:
    """Largest difference of `logits` from those of one token at a time over the same embeddings, relative to
    the largest logit."""
    cache, rows = None, []
    for t in range(len(embeds)):
        got = model.model.language_model(
            inputs_embeds=embeds[None, t : t + 1],
            position_ids=positions[:, None, t : t + 1],
            cache=cache,
            use_cache=True,
        )
        cache = got.cache
        rows.append(model.lm_head(got.last_hidden_state)[0, 0])
    return float((torch.stack(rows) - logits[0]).abs().max() / logits.abs().max())


def run_prompt(
    model,
    ids: list[int],
    pixels: torch.Tensor | None,
    grids: torch.Tensor | None,
    steps: int,
    one_by_one: bool,
) -> Run:
    """Prefill, greedy continuation, and if asked the same prompt again one token at a time."""
    lm, image_id = model.model.language_model, model.config.image_token_id
    tokens = torch.tensor([ids])
    kinds = (tokens == image_id).int()
    seen: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: seen.append(out[0])) for layer in lm.layers]
    hooks.append(lm.layers[0].register_forward_pre_hook(lambda m, a: seen.append(a[0][0])))
    routers: list[torch.Tensor] = []
    hooks += [x.mlp.gate.register_forward_hook(lambda m, a, out: routers.append(out[0])) for x in lm.layers]
    finals: list[torch.Tensor] = []
    hooks.append(lm.norm.register_forward_hook(lambda m, a, out: finals.append(out[0])))
    extra = (
        {}
        if pixels is None
        else {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    )
    out = model(input_ids=tokens, use_cache=True, **extra)
    for hook in hooks:
        hook.remove()
    cache = out.cache
    if pixels is None:
        positions, delta = torch.arange(len(ids)).expand(3, -1), 0
    else:
        pos, deltas = model.model.get_rope_index(tokens, kinds, image_grid_thw=grids)
        positions, delta = pos[:, 0], int(deltas[0, 0])
    linear = [i for i, k in enumerate(lm.config.layer_types) if k == "linear_attention"]
    conv = {i: cache.layers[i].conv_states[0][0].clone() for i in linear}
    recurrent = {i: cache.layers[i].recurrent_states[0][0].clone() for i in linear}

    row, greedy, margin, greedy_rows = out.logits[0, -1], [], math.inf, []
    for step in range(steps):
        top = row.topk(2)
        margin = min(margin, float(top.values[0] - top.values[1]))
        greedy.append(int(top.indices[0]))
        place = torch.full((3, 1, 1), len(ids) + delta + step)
        got = model(input_ids=torch.tensor([greedy[-1:]]), position_ids=place, cache=cache, use_cache=True)
        row = got.logits[0, -1]
        greedy_rows.append(row)

    error = one_by_one_error(model, seen[0], positions, out.logits) if one_by_one else math.nan
    return Run(
        out.logits[0],
        seen,
        finals[0],
        routers,
        positions,
        delta,
        conv,
        recurrent,
        error,
        greedy,
        margin,
        greedy_rows,
        seen[0],
    )


def mtp_with_transformers(
    config: dict, weights: Tensors, next_embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The MTP layer put together from transformers' own parts, in float64, as a cross-check."""
    cfg = Qwen3_5MoeConfig(**json.loads(json.dumps(config))).text_config
    cfg.layer_types = ["full_attention"]
    cfg.num_hidden_layers = 1
    cfg._attn_implementation = cfg._experts_implementation = "eager"
    layer = hf.Qwen3_5MoeDecoderLayer(cfg, 0)
    size, eps = cfg.hidden_size, cfg.rms_norm_eps
    parts = torch.nn.ModuleDict(
        {
            "layer": layer,
            "pre_fc_norm_embedding": hf.Qwen3_5MoeRMSNorm(size, eps),
            "pre_fc_norm_hidden": hf.Qwen3_5MoeRMSNorm(size, eps),
            "norm": hf.Qwen3_5MoeRMSNorm(size, eps),
            "fc": torch.nn.Linear(2 * size, size, bias=False),
        }
    ).double()
    state = {
        n.removeprefix("mtp.").replace("layers.0.", "layer."): t
        for n, t in weights.items()
        if n[:4] == "mtp."
    }
    if "layer.mlp.experts.0.up_proj.weight" in state:
        one = lambda e, n: state.pop(f"layer.mlp.experts.{e}.{n}_proj.weight")  # noqa: E731
        pairs = [(torch.cat([one(e, "gate"), one(e, "up")]), one(e, "down")) for e in range(cfg.num_experts)]
        state["layer.mlp.experts.gate_up_proj"] = torch.stack([a for a, _ in pairs])
        state["layer.mlp.experts.down_proj"] = torch.stack([b for _, b in pairs])
    parts.load_state_dict(state)
    rope = hf.Qwen3_5MoeTextRotaryEmbedding(cfg)
    rope.inv_freq = rope.compute_default_rope_parameters(cfg)[0]
    joined = torch.cat([parts["pre_fc_norm_embedding"](next_embeds), parts["pre_fc_norm_hidden"](hidden)], -1)
    x = parts["fc"](joined)[None]
    n = x.shape[1]
    mask = torch.full((n, n), -math.inf, dtype=torch.float64).triu(1)[None, None]
    x = layer(x, position_embeddings=rope(x, positions[:, None]), attention_mask=mask)
    return parts["norm"](x)[0]
