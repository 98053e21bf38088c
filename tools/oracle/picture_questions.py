"""What the float64 reference says to the picture questions of models/demo, beside transformers.

    python picture_questions.py MODEL EVAL [--compare HF_MODEL] [--transformers]

It needs numpy, tokenizers, jinja2 and Pillow. MODEL is a folder in MLX affine layout; its dequantized weights
go into `reference.py`. Prints one JSON line a question: the smallest margin along the reference's reply
(logit of its token over the best other one) and the token where it is. `--compare` gives the same of a folder
in Hugging Face layout, `--transformers` runs transformers in float32 over either (needs torch and
transformers; the dequantized weights are rounded to float32).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jinja2
import numpy as np
from PIL import Image
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent / "formats"))
sys.path.insert(0, str(Path(__file__).parent))
import reference  # noqa: E402
import verify  # noqa: E402

PAD = "<|image_pad|>"


def canonical(name: str) -> str:
    """Hugging Face's name of an MLX tensor."""
    name = name.replace("language_model.model.", "model.language_model.")
    name = name.replace("language_model.lm_head", "lm_head").replace("vision_tower.", "model.visual.")
    return name.replace(".switch_mlp.", ".experts.")


def dequantized(folder: Path) -> dict[str, np.ndarray]:
    """Tensors of an MLX folder in float64, under Hugging Face's names and layouts."""
    stored = verify.read_file(folder / "model.safetensors")
    out: dict[str, np.ndarray] = {}
    for name, (kind, a) in stored.items():
        base, _, part = name.rpartition(".")
        if part in ("scales", "biases") and base + ".weight" in stored:
            continue
        hf = canonical(name)
        if base + ".scales" in stored:
            scales, biases = (
                verify.widen(stored[f"{base}.{p}"]).astype(np.float64) for p in ("scales", "biases")
            )
            group = 64
            bits = a.shape[-1] * 32 // (scales.shape[-1] * group)
            codes = verify.stream(a, bits).astype(np.float64)
            out[hf] = np.repeat(scales, group, -1) * codes + np.repeat(biases, group, -1)
            continue
        value = verify.widen((kind, a)).astype(np.float64)
        if name.endswith("conv1d.weight"):
            value = np.moveaxis(value, 2, 1)
        elif name.endswith("patch_embed.proj.weight"):
            value = value.transpose(0, 4, 1, 2, 3)
        elif value.ndim == 1 and "norm" in name and "vision" not in name and "linear_attn" not in name:
            value = value - 1.0
        out[hf] = value
    for prefix in {k.split(".experts.")[0] for k in out if ".experts." in k}:
        gate, up, down = (out.pop(f"{prefix}.experts.{p}_proj.weight") for p in ("gate", "up", "down"))
        out[f"{prefix}.experts.gate_up_proj"] = np.concatenate((gate, up), 1)
        out[f"{prefix}.experts.down_proj"] = down
    return out


class FromWeights(reference.Model):
    """The reference model over tensors that are at hand."""

    def __init__(self, config: dict, weights: dict[str, np.ndarray]) -> None:
        self.config, self.w, self.chunked = config, weights, True
        self.text, self.vision = config["text_config"], config["vision_config"]
        self.eps = self.text["rms_norm_eps"]
        self.embed_table = weights["model.language_model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embed_table)


class Questions:
    """The questions with pictures, rendered and tokenized."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.prep = json.loads((model / "preprocessor_config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        environment = jinja2.Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
        self.template = environment.from_string((model / "chat_template.jinja").read_text())
        items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
        self.items = [item for item in items if self.names(item)]
        lines = [json.loads(line) for line in (folder / "reference.jsonl").read_text().splitlines()]
        self.replies = {line["id"]: line["tokens"] for line in lines}

    def names(self, item: dict) -> list[str]:
        parts = [m["content"] for m in item["messages"] if isinstance(m["content"], list)]
        return [p["image_url"]["url"] for part in parts for p in part if p["type"] == "image_url"]

    def text(self, item: dict) -> str:
        """The rendered prompt, one placeholder a picture."""
        form = lambda p: {"type": "image"} if p["type"] == "image_url" else p  # noqa: E731
        messages = [dict(m) for m in item["messages"]]
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = [form(p) for p in message["content"]]
        return self.template.render(
            messages=messages,
            tools=item.get("tools"),
            add_generation_prompt=True,
            enable_thinking=item["enable_thinking"],
        )

    def pictures(self, item: dict) -> list[tuple[np.ndarray, np.ndarray]]:
        read = lambda name: np.asarray(Image.open(self.folder / name).convert("RGB"))  # noqa: E731
        return [reference.preprocess_image(read(name), self.prep) for name in self.names(item)]

    def prompt(self, item: dict, grids: list[np.ndarray]) -> list[int]:
        first, *rest = self.text(item).split(PAD)
        assert len(rest) == len(grids)
        for grid, part in zip(grids, rest):
            first += PAD * int(grid.prod() // self.prep["merge_size"] ** 2) + part
        return self.tokenizer.encode(first, add_special_tokens=False).ids

    def reply(self, item: dict) -> list[int]:
        """The reference's reply: what transformers generated from the bf16 weights. All of them are right."""
        return self.replies[item["id"]]


def margins(model: reference.Model, questions: Questions) -> dict[str, tuple[float, int]]:
    """Smallest margin along the reference's reply, and at which of its tokens."""
    out = {}
    for item in questions.items:
        pixels, grids = zip(*questions.pictures(item))
        prompt, reply = questions.prompt(item, list(grids)), questions.reply(item)
        ids = np.array(prompt + reply[:-1])
        images = [model.vision_tower(values, grid) for values, grid in zip(pixels, grids)]
        pos3, _ = model.positions(ids, list(grids))
        hidden = model.forward(model.prompt_embeds(ids, images), pos3, model.new_states())
        logits = model.logits(hidden[len(prompt) - 1 :])
        rows = np.arange(len(reply))
        right = logits[rows, reply]
        logits[rows, reply] = -np.inf
        gap = right - logits.max(-1)
        out[item["id"]] = (float(gap.min()), int(gap.argmin()))
    return out


def generated(folder: Path, weights: dict[str, np.ndarray] | None, questions: Questions) -> dict[str, bool]:
    """Whether transformers' greedy reply (float32) is that of the reference."""
    import torch
    from transformers import AutoProcessor, Qwen3_5MoeForConditionalGeneration

    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        own = model.state_dict()
        assert {k for k in weights if not k.startswith("mtp.")} == set(own), set(own) ^ set(weights)
        model.load_state_dict({k: torch.from_numpy(weights[k]).float().reshape(own[k].shape) for k in own})
    out = {}
    for item in questions.items:
        pictures = [Image.open(questions.folder / name).convert("RGB") for name in questions.names(item)]
        inputs = processor(text=[questions.text(item)], images=pictures, return_tensors="pt")
        pixels, grids = zip(*questions.pictures(item))
        assert inputs["input_ids"][0].tolist() == questions.prompt(item, list(grids)), item["id"]
        off = np.abs(inputs["pixel_values"].numpy() - np.concatenate(pixels)).max()
        assert off <= 2.1 / 255, (item["id"], off)
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=item["max_tokens"])[0]
        reply = ids[inputs["input_ids"].shape[1] :].tolist()
        out[item["id"]] = reply == questions.reply(item)
    return out


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("model", type=Path)
    ap.add_argument("eval", type=Path)
    ap.add_argument("--compare", type=Path)
    ap.add_argument("--transformers", action="store_true")
    a = ap.parse_args()
    questions = Questions(a.model, a.eval)
    weights = dequantized(a.model)
    config = json.loads((a.model / "config.json").read_text())
    columns = {"margin": margins(FromWeights(config, weights), questions)}
    if a.compare:
        columns["margin_bf16"] = margins(reference.Model(a.compare, chunked=True), questions)
    if a.compare and a.transformers:
        columns["transformers"] = generated(a.compare, weights, questions)
        columns["transformers_bf16"] = generated(a.compare, None, questions)
    for item in questions.items:
        line = {"id": item["id"], "kind": item["kind"]}
        for name, column in columns.items():
            value = column[item["id"]]
            if name.startswith("margin"):
                line[name], line[name.replace("margin", "token")] = value
            else:
                line[name] = value
        print(json.dumps(line))


if __name__ == "__main__":
    main()
