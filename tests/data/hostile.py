"""Forty files as folders of pictures have them, each with what must become of it."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageCms

from fluxray.config.encode import EncodeConfig

LIMITS = EncodeConfig(resolution=64, bucket_step=16, min_side=16, max_pixels=1_000_000)
WIDTH, HEIGHT = 96, 64


class Hostile(NamedTuple):
    """A file and its caption, None for none. `pixels` are what it shows, to `tolerance`; or `fault` is why it cannot be used.

    `notes` are what is said of it; `text` is the caption that it ends up with.
    """

    name: str
    data: bytes | None
    caption: bytes | None = b"a caption"
    pixels: np.ndarray | None = None
    tolerance: int = 0
    fault: str | None = None
    notes: tuple[str, ...] = ()
    text: str = "a caption"


@cache
def scene() -> np.ndarray:
    """Return smooth colours, all different in their corners: uint8 [HEIGHT, WIDTH, 3]."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([x * 255 // (WIDTH - 1), y * 255 // (HEIGHT - 1), (x + y) % 64 + 96], axis=2).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rgb() -> Image.Image:
    return Image.fromarray(scene())


def jpeg(**options: Any) -> bytes:
    return saved(rgb(), "JPEG", quality=95, subsampling=0, **options)


def png_of(colour_type: int, depth: int, rows: np.ndarray) -> bytes:
    """Return a PNG of big-endian samples [H, W x channels], without any filter: what Pillow does not write."""
    height, channels = rows.shape[0], {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", rows.shape[1] // channels, height, depth, colour_type, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def bomb() -> bytes:
    """Return a PNG of 30,000 x 30,000 pixels in a few hundred bytes."""
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100_000)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def grey16() -> np.ndarray:
    return np.linspace(0, 65535, HEIGHT * WIDTH).astype(np.uint16).reshape(HEIGHT, WIDTH)


def of_grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values.astype(np.uint8)[:, :, None], 3, axis=2)


def alpha() -> np.ndarray:
    values = np.full((HEIGHT, WIDTH), 255, np.uint8)
    values[:, : WIDTH // 2] = 0
    values[:, WIDTH // 2 : WIDTH // 2 + 8] = 128
    return values


def on_white(colours: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    share = opacity[:, :, None] / 255
    return np.round(colours * share + 255 * (1 - share)).astype(np.uint8)


def palette() -> tuple[bytes, np.ndarray]:
    """Return a palette PNG whose colour 0 is transparent, and what it shows."""
    quantised = rgb().quantize(16)
    shown = np.asarray(quantised.convert("RGB")).copy()
    shown[np.asarray(quantised) == 0] = 255
    return saved(quantised, "PNG", transparency=0), shown


def turned(orientation: int) -> bytes:
    """Return a PNG that shows the scene once its EXIF orientation is heeded."""
    back = {6: Image.Transpose.ROTATE_90, 3: Image.Transpose.ROTATE_180, 5: Image.Transpose.TRANSPOSE}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(rgb().transpose(back), "PNG", exif=exif)


def cmyk() -> tuple[bytes, np.ndarray]:
    image = rgb().convert("CMYK")
    return saved(image, "TIFF"), np.asarray(image.convert("RGB"))


def srgb() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def frames(kind: str) -> bytes:
    other = Image.new("RGB", (WIDTH, HEIGHT), "red")
    return saved(rgb(), kind, save_all=True, append_images=[other, other], **({"lossless": True} if kind == "WEBP" else {}))


@cache
def hostile() -> tuple[Hostile, ...]:
    """Return them all. `vanished.png` is listed by whoever writes them, and removed before it is read."""
    plain = saved(rgb(), "PNG")
    whole, here = jpeg(), scene()
    lossy = np.asarray(Image.open(io.BytesIO(whole)))
    palette_png, palette_shown = palette()
    cmyk_tiff, cmyk_shown = cmyk()
    rgba = np.dstack([here, alpha()])
    upright, white = ("turned upright",), ("transparent: laid onto white",)
    sixteen, first = ("16 bits: scaled to 8",), ("several frames: the first",)
    grey = np.round(grey16() / 257)
    wide48 = (here.astype(np.uint16) * 257).astype(">u2").reshape(HEIGHT, -1)
    cp1252 = "caf\xe9 \u201cnoir\u201d".encode("cp1252")

    def fine(name: str, data: bytes, pixels: np.ndarray = here, tolerance: int = 0, notes: tuple[str, ...] = ()) -> Hostile:
        return Hostile(name, data, pixels=pixels, tolerance=tolerance, notes=notes)

    def bad(name: str, data: bytes | None, fault: str) -> Hostile:
        return Hostile(name, data, fault=fault)

    def said(name: str, caption: bytes | None, text: str, notes: tuple[str, ...] = ()) -> Hostile:
        return Hostile(name, plain, caption, pixels=here, notes=notes, text=text)

    return (
        fine("plain.png", plain),
        fine("duplicate.png", plain),
        fine("photo.jpg", whole, lossy),
        fine("exif-3.png", turned(3), notes=upright),
        fine("exif-5.png", turned(5), notes=upright),
        fine("exif-6.png", turned(6), notes=upright),
        fine("exif-damaged.jpg", jpeg(exif=b"Exif\0\0" + b"\xff" * 40), lossy),
        fine("cmyk.tif", cmyk_tiff, cmyk_shown),
        fine("cmyk.jpg", saved(rgb().convert("CMYK"), "JPEG", quality=95), cmyk_shown, 12),
        fine("grey-16.png", saved(Image.fromarray(grey16()), "PNG"), of_grey(grey), 0, sixteen),
        fine("grey-16.tif", saved(Image.fromarray(grey16()), "TIFF"), of_grey(grey), 0, sixteen),
        fine("rgb-48.png", png_of(2, 16, wide48), here),
        fine("grey-8.png", saved(rgb().convert("L"), "PNG"), of_grey(np.asarray(rgb().convert("L")))),
        fine("bilevel.png", saved(rgb().convert("1"), "PNG"), of_grey(np.asarray(rgb().convert("1")) * np.uint8(255))),
        fine("rgba.png", saved(Image.fromarray(rgba), "PNG"), on_white(here, alpha()), 1, white),
        fine("rgba.webp", saved(Image.fromarray(rgba), "WEBP", lossless=True, exact=True), on_white(here, alpha()), 1, white),
        fine(
            "la.png",
            saved(Image.fromarray(rgba).convert("LA"), "PNG"),
            on_white(of_grey(np.asarray(rgb().convert("L"))), alpha()),
            1,
            white,
        ),
        fine("palette-transparent.png", palette_png, palette_shown, 0, white),
        fine("animated.webp", frames("WEBP"), here, 0, first),
        fine("animated.png", frames("PNG"), here, 0, first),
        fine("pages.tif", frames("TIFF"), here, 0, first),
        fine("icc-srgb.png", saved(rgb(), "PNG", icc_profile=srgb())),
        fine("icc-damaged.png", saved(rgb(), "PNG", icc_profile=b"no profile"), notes=("ICC profile left alone: damaged",)),
        fine("jpeg-named.png", whole, lossy),
        bad("truncated.jpg", whole[: len(whole) // 2], "truncated"),
        bad("truncated.png", plain[: len(plain) // 2], "truncated"),
        bad("empty.jpg", b"", "zero bytes"),
        bad("text.png", b"This is not a picture.\n", "no picture: text"),
        bad("phone.heic", b"\0\0\0\x18ftypheic" + b"\0" * 64, "no picture: HEIC; convert it to JPEG or PNG"),
        bad("noise.jpg", bytes(range(128, 256)) * 8, "no picture: a format that is not known"),
        bad("tiny.png", saved(Image.new("RGB", (1, 1)), "PNG"), "too small: 1 x 1, encode.min_side is 16"),
        bad(
            "wide.png",
            saved(Image.new("1", (20_000, 16)), "PNG"),
            "too long or too wide: 20000 x 16, encode.max_aspect is 3",
        ),
        bad("20000x10.png", saved(Image.new("1", (20_000, 10)), "PNG"), "too small: 20000 x 10, encode.min_side is 16"),
        bad("bomb.png", bomb(), "too many pixels: 900,000,000 in all, encode.max_pixels is 1,000,000"),
        bad(
            "small.png",
            saved(Image.new("RGB", (20, 20)), "PNG"),
            "too small: 20 x 20 would be enlarged 3.20 times, encode.max_upscale is 1.5",
        ),
        bad(
            "float.tif", saved(Image.new("F", (64, 64)), "TIFF"), "pixels of an unknown range: mode F; convert it to 8 or 16 bits"
        ),
        bad("invisible.png", saved(Image.new("RGBA", (64, 64)), "PNG"), "transparent: no pixel of it can be seen"),
        bad("vanished.png", None, "missing: the file is not there"),
        Hostile("no-caption.png", plain, None, fault="no caption: missing"),
        Hostile("empty-caption.png", plain, b"", fault="no caption: blank"),
        Hostile("blank-caption.png", plain, b"\xef\xbb\xbf \r\n\t", fault="no caption: blank"),
        Hostile("binary-caption.png", plain, b"a\0b", fault="caption unreadable: binary file, NUL at byte 1"),
        Hostile("odd-caption.png", plain, b"\x81\xff", fault="caption unreadable: neither UTF-8 nor CP1252 at byte 0 (0x81)"),
        said("bom.png", b"\xef\xbb\xbfa cat", "a cat"),
        said("crlf.png", b"a cat\r\non a mat\r\n", "a cat\non a mat"),
        said("cp1252.png", cp1252, "caf\xe9 \u201cnoir\u201d", ("caption read as CP1252",)),
        said("utf16.png", "a caf\xe9".encode("utf-16"), "a caf\xe9", ("caption read as UTF-16",)),
        said("emoji.png", "a \U0001f6b2 by the \u6d77".encode(), "a \U0001f6b2 by the \u6d77"),
        said("long.png", b"word " * 10_000, " ".join(["word"] * 10_000)),
    )


def write_folder(folder: Path, files: tuple[Hostile, ...] | None = None) -> Callable[[], None]:
    """Write the files into `folder`; what is returned makes the vanishing ones vanish."""
    vanishing = []
    for number, file in enumerate(hostile() if files is None else files):
        path = folder / ("sub" if number % 5 == 0 else "") / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(saved(rgb(), "PNG") if file.data is None else file.data)
        if file.data is None:
            vanishing.append(path)
        if file.caption is not None:
            path.with_suffix(".txt").write_bytes(file.caption)
    return lambda: [path.unlink() for path in vanishing] and None
