"""Test pictures of crates/picture, each beside what a person sees of it, as an opaque PNG.

    python pictures.py FOLDER        (Pillow 13, numpy)

Pillow decodes and blends here; the crate under test uses other decoders. Lossy formats may differ by a few
levels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (28, 20)


def drawing() -> Image.Image:
    """Smooth colours with one hard edge."""
    y, x = np.mgrid[0 : SIZE[1], 0 : SIZE[0]]
    rgb = np.stack([40 + 7 * x, 230 - 9 * y, 60 + 3 * x + 4 * y], axis=-1).clip(0, 255)
    rgb[5:12, 8:20] = (220, 30, 30)
    return Image.fromarray(rgb.astype(np.uint8), "RGB")


def see_through(image: Image.Image) -> Image.Image:
    """The drawing, more and more transparent to the right."""
    image = image.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").rotate(90).resize(SIZE))
    return image


def over_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def main(folder: Path) -> None:
    base = drawing()
    clear = see_through(base)
    other = Image.new("RGB", SIZE, "blue")
    folder.mkdir(parents=True, exist_ok=True)
    base.save(folder / "lossy.webp", quality=90)
    base.save(folder / "lossless.webp", lossless=True)
    clear.save(folder / "lossy-alpha.webp", quality=90, alpha_quality=100)
    clear.save(folder / "lossless-alpha.webp", lossless=True, exact=True)
    base.save(folder / "animated.webp", save_all=True, append_images=[other], lossless=True)
    base.save(folder / "animated.gif", save_all=True, append_images=[other])
    cut = clear.copy()
    cut.putalpha(cut.getchannel("A").point(lambda a: 255 if a > 100 else 0))
    cut.save(folder / "transparent.gif")
    base.save(folder / "colour.jpg", quality=92, subsampling=0)
    base.save(folder / "subsampled.jpg", quality=92, subsampling=2)
    base.save(folder / "progressive.jpg", quality=92, subsampling=2, progressive=True)
    base.convert("L").save(folder / "grey.jpg", quality=92)
    base.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    for file in sorted(folder.iterdir()):
        if file.suffix == ".png":
            continue
        with Image.open(file) as image:
            image.seek(0)
            over_white(image).save(folder / f"{file.name}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
