"""Read a fixture by the written rules alone (numpy and the standard library) and check its goldens.

    python verify.py FOLDER...

Nothing here comes from the libraries that wrote the files, so agreement shows that the
rules in docs/formats.md are enough to read them.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path

import numpy as np

KINDS = {
    "BF16": (2, "<u2"),
    "F16": (2, "<f2"),
    "F32": (4, "<f4"),
    "U32": (4, "<u4"),
    "I32": (4, "<u4"),
    "I64": (8, "<i8"),
}


def sha(a) -> str:
    return hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()


def pairs(items):
    keys = [k for k, _ in items]
    if len(set(keys)) != len(keys):
        raise ValueError("a key is repeated")
    return dict(items)


def read_file(path: Path) -> dict:
    blob = path.read_bytes()
    (n,) = struct.unpack("<Q", blob[:8])
    if 8 + n > len(blob):
        raise ValueError(f"{path.name}: not a safetensors file")
    header = json.loads(blob[8 : 8 + n], object_pairs_hook=pairs)
    header.pop("__metadata__", None)
    out, last = {}, 0
    for name, t in header.items():
        size, kind = KINDS[t["dtype"]]
        begin, end = t["data_offsets"]
        if end - begin != size * int(np.prod(t["shape"], dtype=np.int64)):
            raise ValueError(f"{name}: size does not match its shape")
        out[name] = (
            t["dtype"],
            np.frombuffer(blob, kind, (end - begin) // size, 8 + n + begin).reshape(t["shape"]),
        )
        last = max(last, end)
    if 8 + n + last != len(blob):
        raise ValueError(f"{path.name}: truncated or overlong")
    return out


def widen(t) -> np.ndarray:
    kind, a = t
    return (a.astype("<u4") << 16).view("<f4") if kind == "BF16" else a.astype(np.float32)


def stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Rows of words as one little-endian bit stream of codes."""
    flat = np.unpackbits(np.ascontiguousarray(words, "<u4").view(np.uint8), axis=-1, bitorder="little")
    flat = flat.reshape(*words.shape[:-1], -1, bits)
    return (flat * (1 << np.arange(bits)).astype(np.uint16)).sum(-1).astype(np.uint8)


def module(name: str, t: dict, width: int):
    """-> codes, F32 values, bits, group, from the shapes and the logical input width."""
    if name + ".qweight" in t:
        q, z, s = t[name + ".qweight"][1], t[name + ".qzeros"][1], widen(t[name + ".scales"])
        bits, group = q.shape[0] * 32 // width, width // s.shape[0]
        codes = stream(q.T, bits)
        zero = stream(z, bits).astype(np.int32) + 1
        if (zero != 1 << (bits - 1)).any():
            raise ValueError(f"{name}: asymmetric weights are not supported")
        value = np.repeat(s.T, group, 1) * (codes.astype(np.float32) - float(1 << (bits - 1)))
    elif name + ".weight_packed" in t:
        q, s = t[name + ".weight_packed"][1], widen(t[name + ".weight_scale"])
        bits, group = q.shape[1] * 32 // width, width // s.shape[1]
        codes = stream(q, bits)
        if list(t[name + ".weight_shape"][1]) != list(codes.shape):
            raise ValueError(f"{name}: weight_shape does not match")
        value = np.repeat(s, group, 1) * (codes.astype(np.float32) - float(1 << (bits - 1)))
    else:
        q, s, b = t[name + ".weight"][1], widen(t[name + ".scales"]), widen(t[name + ".biases"])
        bits, group = q.shape[-1] * 32 // width, width // s.shape[-1]
        codes = stream(q, bits)
        value = np.repeat(s, group, -1) * codes + np.repeat(b, group, -1)
    return codes, value.astype("<f4") + np.float32(0), bits, group  # -0.0 becomes 0.0


def check(folder: Path) -> None:
    golden = json.loads((folder / "goldens/goldens.json").read_text())
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    tensors = {}
    for file in sorted(set(files) | {p.name for p in folder.glob("mtp*.safetensors")}):
        for name, t in read_file(folder / file).items():
            if name in tensors:
                raise ValueError(f"{name} is in two files")
            tensors[name] = t
    used, negative = set(), 0
    for name, want in golden["quantized"].items():
        codes, value, bits, group = module(name, tensors, want["shape"][-1])
        got = (list(value.shape), bits, group, sha(codes), sha(value))
        if got != (want["shape"], want["bits"], want["group_size"], want["codes_sha256"], want["f32_sha256"]):
            raise ValueError(f"{name}: {got} against {want}")
        used |= {k for k in tensors if k.rpartition(".")[0] == name}
        scale = next(k for k in (".scales", ".weight_scale") if name + k in tensors)
        negative += (widen(tensors[name + scale]) < 0).any()
    for name, want in golden["unquantized"].items():
        kind, a = tensors[name]
        if "axis order" in want.get("note", ""):
            a = np.moveaxis(a, 2, 1) if "conv1d" in name else a.transpose(0, 4, 1, 2, 3)
        if sha(a) != want["sha256"] or list(a.shape) != want["shape"]:
            raise ValueError(f"{name}: differs")
        used.add(name)
    if set(tensors) != used:
        raise ValueError(f"not covered: {sorted(set(tensors) - used)[:5]}")
    print(
        f"{folder.name}: {len(golden['quantized'])} packed ({negative} with negative scales), "
        f"{len(golden['unquantized'])} plain, all equal"
    )


if __name__ == "__main__":
    for f in sys.argv[1:]:
        check(Path(f))
