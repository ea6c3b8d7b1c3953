"""Captions as they lie in files and rows become text, or a reason why the picture has none."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fluxray.data.decode import Quarantined
from fluxray.data.sources import BOM

CAPTION_KEYS = ("text", "caption")
"""Fields that hold captions where the configuration names none, the first that is there."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Caption(NamedTuple):
    """A caption: `text` is None where there is none, `fault` says why one cannot be read, `notes` how it was."""

    text: str | None
    fault: str | None = None
    notes: tuple[str, ...] = ()


def caption_of_bytes(data: bytes) -> Caption:
    """Return the caption in a file: UTF-8, UTF-16 with its mark, or else CP1252, which is noted.

    A byte order mark is dropped, CRLF becomes LF, white space at both ends goes.
    """
    notes: tuple[str, ...] = ()
    try:
        if data[:2] in _UTF16:
            text, notes = data.decode("utf-16"), ("caption read as UTF-16",)
        elif b"\0" in data:
            return Caption(None, f"binary file, NUL at byte {data.index(0)}")
        else:
            text = data.removeprefix(BOM).decode()
    except UnicodeDecodeError:
        try:
            text, notes = data.decode("cp1252"), ("caption read as CP1252",)
        except UnicodeDecodeError as error:
            return Caption(None, f"neither UTF-8 nor CP1252 at byte {error.start} (0x{data[error.start]:02x})")
    return Caption(_tidy(text), None, notes)


def caption_of_value(value: Any) -> Caption:
    """Return the caption in a field of a row; null is none, a whole number (a class) is its digits."""
    if value is None:
        return Caption(None)
    if isinstance(value, int) and not isinstance(value, bool):
        return Caption(str(value))
    if not isinstance(value, str):
        return Caption(None, f"{type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Caption(None, f"lone surrogate at character {error.start}")
    return Caption(_tidy(value))


def caption_field(names: Sequence[str] | Mapping[str, Any], caption_key: str | None) -> str | None:
    """Return which of the fields `names` holds the caption; None if none does."""
    wanted = CAPTION_KEYS if caption_key is None else (caption_key,)
    return next((name for name in wanted if name in names), None)


def settled(text: str | None, fault: str | None, policy: str) -> str:
    """Return the text that is encoded, by `encode.no_caption`; raises Quarantined."""
    if fault is not None:
        raise Quarantined("caption unreadable", fault)
    if text:
        return text
    if policy == "quarantine":
        raise Quarantined("no caption", "missing" if text is None else "blank")
    return ""


def _tidy(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip().strip("\ufeff").strip()
