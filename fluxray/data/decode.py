"""The bytes of a picture file become an upright RGB picture, or a reason why it cannot be used.

| file | picture |
| --- | --- |
| EXIF orientation | turned upright |
| transparent pixels (alpha, palette, colour key) | laid onto white; or, where alpha is a loss mask, left as they are |
| 16 bits a channel | scaled to 8: 65535 is 255 |
| CMYK, grey, palette, bilevel | RGB |
| ICC profile that fits | its colours converted to sRGB (relative colorimetric); without a profile sRGB is assumed |
| animated, several pages | the first |

Nothing is decoded whose header tells of too many pixels, or of sides that are out of bounds.
"""

import io
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError, features

from fluxray.config.encode import EncodeConfig
from fluxray.errors import one_line

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF")
"""What is read. Others of Pillow's are no formats of photographs, and one of them starts another program."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each EXIF orientation."""

_SIGNATURES = {b"ftypheic": "HEIC", b"ftypheix": "HEIC", b"ftypmif1": "HEIF", b"<svg": "SVG", b"%PDF": "PDF", b"8BPS": "PSD"}


class Quarantined(Exception):
    """A picture that cannot be used. `reason` is the kind of fault, for counting; `detail` says more of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Picture(NamedTuple):
    """An upright picture: `image` is RGB, `notes` say what was done to the file's pixels.

    `alpha` (L, of the same size; 255 is opaque) is there where the file has it and it was asked for.
    """

    image: Image.Image
    notes: tuple[str, ...] = ()
    alpha: Image.Image | None = None


def decode(data: bytes, limits: EncodeConfig) -> Picture:
    """Return the picture in `data`; raises Quarantined. Its alpha is kept, and not laid onto white, with `limits.mask` alpha."""
    return _guarded(data, limits, lambda opened: _picture(opened, keep_alpha=limits.mask == "alpha"))


def decode_mask(data: bytes, limits: EncodeConfig, size: tuple[int, int]) -> Image.Image:
    """Return a mask file as an L picture of `size` (width, height), 255 where the loss counts in full.

    A mask of the same shape and another size is scaled. Raises Quarantined.
    """
    try:
        mask = _guarded(data, limits, lambda opened: _picture(opened, keep_alpha=False)).image.convert("L")
    except Quarantined as fault:
        raise Quarantined("mask unreadable", str(fault)) from None
    if mask.width * size[1] != mask.height * size[0]:
        raise Quarantined("mask of another shape", f"{mask.width} x {mask.height}, the picture {size[0]} x {size[1]}")
    return mask if mask.size == size else mask.resize(size, Image.Resampling.BILINEAR)


def check_size(size: tuple[int, int], limits: EncodeConfig) -> None:
    """Raise Quarantined for a width and height that are out of bounds."""
    width, height = size
    if width * height > limits.max_pixels:
        raise Quarantined("too many pixels", f"{width} x {height}, encode.max_pixels is {limits.max_pixels:,}")
    if min(size) < limits.min_side:
        raise Quarantined("too small", f"{width} x {height}, encode.min_side is {limits.min_side}")
    if max(size) > limits.max_aspect * min(size):
        raise Quarantined("too long or too wide", f"{width} x {height}, encode.max_aspect is {limits.max_aspect:g}")


def _guarded(data: bytes, limits: EncodeConfig, read: Callable[[Any], Picture]) -> Picture:
    """Return what `read` makes of the opened file; every fault becomes Quarantined."""
    _hush(limits)
    if not data:
        raise Quarantined("zero bytes")
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as opened:
            check_size(opened.size, limits)
            return read(opened)
    except Quarantined:
        raise
    except UnidentifiedImageError:
        raise Quarantined("no picture", _kind_of(data)) from None
    except Image.DecompressionBombError as error:  # far beyond the bound, and Pillow tells no width
        number = int((re.findall(r"\d+", str(error)) or [0])[0])
        raise Quarantined("too many pixels", f"{number:,} in all, encode.max_pixels is {limits.max_pixels:,}") from None
    except MemoryError:
        raise Quarantined("damaged", "decoding it takes more memory than there is") from None
    except Exception as error:  # noqa: BLE001 - Pillow's readers raise whatever damaged bytes lead them to
        truncated = "truncated" in str(error) or isinstance(error, EOFError)
        raise Quarantined("truncated" if truncated else "damaged", one_line(error)) from None


def _hush(limits: EncodeConfig) -> None:
    """Let Pillow say nothing: what matters is in notes and reasons. The bound on pixels is ours, checked before decoding."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, limits.max_pixels)


def _formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _kind_of(data: bytes) -> str:
    """Return what a file is, as far as its first bytes tell, that is none of the formats."""
    head = data[:512]
    for signature, name in _SIGNATURES.items():
        if signature in head[:32] or (name == "SVG" and signature in head):
            return f"{name}; convert it to JPEG or PNG"
    try:
        text = head.decode()
    except UnicodeDecodeError:
        return "a format that is not known"
    return "text" if text.isprintable() or "\n" in text else "a format that is not known"


def _picture(opened: Image.Image, keep_alpha: bool) -> Picture:
    notes: list[str] = []
    if getattr(opened, "is_animated", False) and opened.format != "MPO":
        opened.seek(0)
        notes.append("several frames: the first")
    opened.load()
    image = _upright(_eight_bits(opened, notes), opened, notes)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
        lowest, highest = cast(tuple[int, int], alpha.getextrema())
        rgb = _in_srgb(image.convert("RGB"), opened, notes)
        if highest == 0:
            raise Quarantined("transparent", "no pixel of it can be seen")
        if keep_alpha:
            return Picture(rgb, (*notes, "alpha is the mask"), alpha)
        if lowest < 255:
            notes.append("transparent: laid onto white")
            rgb = Image.composite(rgb, Image.new("RGB", rgb.size, "white"), alpha)
        return Picture(rgb, tuple(notes))
    return Picture(_in_srgb(image, opened, notes), tuple(notes))


def _eight_bits(opened: Image.Image, notes: list[str]) -> Image.Image:
    """Return the picture with 8 bits a channel. Of 16-bit RGB Pillow itself takes the high byte, grey it would clip."""
    if opened.mode == "F" or (opened.mode == "I" and opened.format != "PNG"):
        raise Quarantined("pixels of an unknown range", f"mode {opened.mode}; convert it to 8 or 16 bits")
    if not opened.mode.startswith("I"):
        return opened
    notes.append("16 bits: scaled to 8")
    values = np.asarray(opened).astype(np.uint32)
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    key = opened.info.get("transparency")
    if isinstance(key, int):
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _upright(image: Image.Image, opened: Image.Image, notes: list[str]) -> Image.Image:
    orientation = _orientation(opened)
    if orientation == 0:
        notes.append("EXIF damaged: not turned")
    turn = _TURNS.get(orientation)
    if turn is None:
        return image
    notes.append("turned upright")
    turned = image.transpose(turn)
    turned.info = dict(image.info)
    return turned


def _orientation(opened: Image.Image) -> int:
    """Return the EXIF orientation, 1 where there is none, 0 where EXIF cannot be read."""
    try:
        return int(opened.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - damaged EXIF raises anything; the pixels are fine
        return 0


def _in_srgb(image: Image.Image, opened: Image.Image, notes: list[str]) -> Image.Image:
    """Return the picture in RGB, its colours by the file's ICC profile where that is of its colour space."""
    data = opened.info.get("icc_profile")
    if not data:
        return _rgb(image)
    image = image.convert("RGB") if image.mode in ("P", "1") else image
    space = {"RGB": "RGB", "CMYK": "CMYK", "L": "GRAY"}.get(image.mode)
    if not features.check("littlecms2"):
        notes.append("ICC profile left alone: Pillow lacks littlecms")
        return _rgb(image)
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(data))
        facts: Any = profile.profile
        if facts.xcolor_space.strip() != space:
            notes.append("ICC profile left alone: of another colour space")
            return _rgb(image)
        if "sRGB" in (facts.profile_description or ""):
            return _rgb(image)
        converted = ImageCms.profileToProfile(
            image,
            profile,
            ImageCms.createProfile("sRGB"),
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            "RGB",
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        notes.append("ICC profile left alone: damaged")
        return _rgb(image)
    notes.append("ICC profile: converted to sRGB")
    return converted if converted is not None else _rgb(image)


def _rgb(image: Image.Image) -> Image.Image:
    try:
        return image.convert("RGB")
    except ValueError:
        raise Quarantined("pixels of an unknown range", f"mode {image.mode}; convert it to RGB") from None
