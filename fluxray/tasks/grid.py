"""Sampled pictures on paper: a labelled grid, and PNG files that say what they were made of."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

LARGEST, SMALLEST = 512, 160
"""Pixels of the longer side of a picture in a grid, at most and at least."""

MARGIN, TITLE_SIZE, TEXT_SIZE = 8, 18, 14
CAPTION_LINES = 2


def draw_grid(
    pictures: Sequence[Sequence[Image.Image]], captions: Sequence[str], seeds: Sequence[int], title: str
) -> Image.Image:
    """Return one picture of all: a row for each caption, which stands above it, a column for each seed."""
    width, height = _cell(pictures[0][0])
    columns = len(seeds)
    total = columns * width + (columns + 1) * MARGIN
    titles, line = _lines(title, total, TITLE_SIZE), round(1.35 * TEXT_SIZE)
    head = MARGIN + len(titles) * round(1.35 * TITLE_SIZE) + line
    texts = [_lines(caption or "(no caption)", total, TEXT_SIZE)[:CAPTION_LINES] for caption in captions]
    grid = Image.new("RGB", (total, head + sum(len(text) * line + height + 2 * MARGIN for text in texts)), "white")
    draw = ImageDraw.Draw(grid)
    large, small = (ImageFont.truetype(_font(), size) for size in (TITLE_SIZE, TEXT_SIZE))
    for number, text in enumerate(titles):
        draw.text((MARGIN, MARGIN + number * round(1.35 * TITLE_SIZE)), text, "black", large)
    for column, seed in enumerate(seeds):
        draw.text((MARGIN + column * (width + MARGIN), head - line), f"seed {seed}", "#666666", small)
    top = head
    for row, text in zip(pictures, texts, strict=True):
        for number, words in enumerate(text):
            draw.text((MARGIN, top + number * line), words, "black", small)
        top += len(text) * line + MARGIN // 2
        for column, picture in enumerate(row):
            grid.paste(picture.convert("RGB").resize((width, height)), (MARGIN + column * (width + MARGIN), top))
        top += height + 2 * MARGIN - MARGIN // 2
    return grid


def save_png(picture: Image.Image, path: Path, told: Mapping[str, object]) -> None:
    """Write a PNG whose text chunks hold what is `told`. It appears whole or not at all; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = PngInfo()
    for key, value in told.items():
        info.add_itxt(key, str(value))
    partial = path.with_name(f".{path.name}.partial")
    picture.save(partial, "PNG", pnginfo=info)
    partial.replace(path)


def file_name(number: int, prompt: str, seed: int) -> str:
    """Return the name of a picture: its prompt's number and first words, and its seed."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:48].rstrip("-")
    return "-".join(part for part in (f"{number:03d}", words, f"seed{seed}") if part) + ".png"


def _font() -> str:
    """Return the file of a font with most of the world's alphabets, which comes with matplotlib."""
    import matplotlib

    return f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"


def _cell(picture: Image.Image) -> tuple[int, int]:
    longer = max(picture.size)
    scale = min(max(longer, SMALLEST), LARGEST) / longer
    return round(picture.width * scale), round(picture.height * scale)


def _lines(text: str, width: int, size: int) -> list[str]:
    """Break text into lines of about `width` pixels."""
    return textwrap.wrap(text, max(int(width / (0.6 * size)), 8), max_lines=4) or [""]
