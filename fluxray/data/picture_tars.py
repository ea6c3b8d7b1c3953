"""Pictures in WebDataset tars: members of one name and different ends, one behind the other, are a sample."""

import glob
import json
import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

from fluxray.data.captions import Caption, caption_field, caption_of_bytes, caption_of_value
from fluxray.data.decode import Quarantined
from fluxray.data.pictures import MASK_SUFFIX, Loaded, PictureRef, Place, file_stamp, is_picture, read_file, unique_key
from fluxray.errors import DataError, one_line

_TEXT_SUFFIXES = ("txt", "json", "cls")
"""Members that hold a caption; of several the first of these counts that has one."""

_Member = tuple[tarfile.TarInfo, bytes | None]


@dataclass(frozen=True)
class TarPictures:
    """The pictures of all tars, uncompressed, that `pattern` names: an absolute path with *, ? or {0000..0099}, {a,b}.

    A tar that breaks off gives what comes before, and a reference whose fault says so.
    """

    pattern: str
    config_key: str
    caption_key: str | None
    masks: bool

    @property
    def name(self) -> str:
        """The reference."""
        return f"tars:{self.pattern}"

    def refs(self) -> Iterator[PictureRef]:
        """Yield the pictures of each tar in their order; one whose name an earlier tar has gets its tar's name before."""
        return (ref for ref, _ in self._samples(with_bytes=False))

    def load(self, place: Place) -> bytes:
        """Return the bytes of a member; raises Quarantined."""
        return read_file(place.path, place.size, place.start or 0)

    def stream(self) -> Iterator[tuple[PictureRef, Loaded]]:
        """Yield all pictures with their bytes; each tar is read once, from its first byte to its last."""
        for ref, data in self._samples(with_bytes=True):
            yield ref, data if data is not None else Quarantined("unreadable", ref.fault or "")

    def stamp(self, place: Place) -> list[int]:
        """Return size and time of the file, if it is one."""
        return file_stamp(place)

    def ignored(self) -> Mapping[str, int]:
        """Return how many other members there are, by the end of their name."""
        counts: Counter[str] = Counter()
        for path in self._files:
            with open(path, "rb") as file:
                for info, _ in _members(file, path, lambda _: False, seek=True):
                    count_ignored(counts, info.name, self.masks)
        return +counts

    @property
    def _files(self) -> list[str]:
        found = []
        for pattern in expand_braces(self.pattern):
            matching = sorted(glob.glob(pattern)) if not os.path.exists(pattern) else [pattern]
            if not matching:
                raise DataError(f"{self.config_key}: tars:{pattern}: is no file, and matches none; check the path")
            found += matching
        return found

    def _samples(self, with_bytes: bool) -> Iterator[tuple[PictureRef, bytes | None]]:
        taken: set[str] = set()
        for path in self._files:
            stem = os.path.basename(path).partition(".")[0]
            try:
                with open(path, "rb") as file:
                    for ref, data in tar_samples(file, path, self.caption_key, self.masks, with_bytes):
                        key = unique_key(ref.key, taken, stem)
                        taken.add(key)
                        yield replace(ref, key=key), data
            except OSError as error:
                raise DataError(f"{self.config_key}: {path}: cannot be read ({error.strerror}); check its permissions") from None


class _StrictInfo(tarfile.TarInfo):
    """A header that is wrong or missing is a fault; tarfile by itself takes it for the end."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> "_StrictInfo":
        """Return the next member."""
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined] # the block of zeros behind the last member
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def tar_samples(
    file: IO[bytes],
    path: str,
    caption_key: str | None,
    masks: bool,
    with_bytes: bool,
    seen: Callable[[str], None] | None = None,
) -> Iterator[tuple[PictureRef, bytes | None]]:
    """Yield the pictures of a tar that is read once, from a file, pipe or connection; with their bytes if that is asked for.

    Without them a file that can be positioned is not read where they lie. `path` is what places name; `seen` is told the name of
    each member. Where the tar breaks off, a reference whose fault says so comes last.
    """

    def wanted(name: str) -> bool:
        return _suffix(name) in _TEXT_SUFFIXES or (with_bytes and is_picture(name))

    group: list[_Member] = []
    try:
        for member in _members(file, path, wanted, seek=not with_bytes and file.seekable()):
            if seen is not None:
                seen(member[0].name)
            if group and _group(member[0].name) != _group(group[0][0].name):
                yield from _pictures_of(group, path, caption_key, masks)
                group = []
            group.append(member)
    except Quarantined as fault:
        yield from _pictures_of(group, path, caption_key, masks)
        yield PictureRef(os.path.basename(path), None, Place(path), fault=str(fault)), None
        return
    yield from _pictures_of(group, path, caption_key, masks)


def count_ignored(counts: Counter[str], name: str, masks: bool) -> None:
    """Count a member of a tar that is neither a picture nor a caption; `masks`: those are of use."""
    suffix = _suffix(name)
    counts[f".{suffix}"] += suffix not in _TEXT_SUFFIXES and not is_picture(name)
    counts["masks, with encode.mask none"] += name.endswith(MASK_SUFFIX) and not masks


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns that `{0000..0099}` (numbers of one width) and `{a,b}` stand for, in their order."""
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if found is None:
        return [pattern]
    low, high, names = found.groups()
    parts = names.split(",") if names else [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return [whole for part in parts for whole in expand_braces(pattern[: found.start()] + part + pattern[found.end() :])]


def _members(file: IO[bytes], path: str, wanted: Callable[[str], bool], seek: bool) -> Iterator[_Member]:
    """Yield the files in a tar, with their bytes where `wanted` says so of their name; Quarantined where it breaks off."""
    number = 0
    try:
        with tarfile.open(fileobj=file, mode="r:" if seek else "r|", tarinfo=_StrictInfo) as tar:
            for info in tar:
                number += 1
                if not info.isfile() or posixpath.basename(info.name).startswith("."):
                    continue
                data = None
                if wanted(info.name):
                    member = tar.extractfile(info)
                    data = b"" if member is None else member.read()
                yield info, data
    except (tarfile.TarError, EOFError) as error:
        what = "is no uncompressed tar" if number == 0 else f"breaks off after {number} members"
        raise Quarantined("tar damaged", f"{os.path.basename(path)} {what} ({one_line(error)})") from None


def _pictures_of(
    group: list[_Member], path: str, caption_key: str | None, masks: bool
) -> Iterator[tuple[PictureRef, bytes | None]]:
    members = {info.name: (info, data) for info, data in group}
    stems = {posixpath.splitext(name)[0] for name in members if is_picture(name)}
    for name, (info, data) in members.items():
        stem = posixpath.splitext(name)[0]
        if not is_picture(name) or (name.endswith(MASK_SUFFIX) and name.removesuffix(MASK_SUFFIX) in stems):
            continue
        caption = _caption(members, stem, caption_key)
        mask = members.get(stem + MASK_SUFFIX) if masks else None
        place = None if mask is None else Place(path, mask[0].offset_data, mask[0].size)
        key = posixpath.normpath(name).lstrip("/")
        yield PictureRef(key, caption.text, Place(path, info.offset_data, info.size), place, caption.notes, caption.fault), data


def _caption(members: Mapping[str, _Member], stem: str, caption_key: str | None) -> Caption:
    """Return the caption of the picture `stem`: from members of exactly its name, else from those of its group."""
    for names in ([f"{stem}.{suffix}" for suffix in _TEXT_SUFFIXES], [f"{_group(stem)}.{suffix}" for suffix in _TEXT_SUFFIXES]):
        for name in names:
            if name in members:
                caption = _caption_of_member(name, members[name][1] or b"", caption_key)
                if caption is not None:
                    return caption
    return Caption(None)


def _caption_of_member(name: str, data: bytes, caption_key: str | None) -> Caption | None:
    """Return the caption that a member holds; None for a json without such a field."""
    if _suffix(name) != "json":
        return caption_of_bytes(data)
    try:
        row: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Caption(None, f"json cannot be read ({one_line(error)})")
    field = caption_field(row, caption_key) if isinstance(row, dict) else None
    return None if field is None else caption_of_value(row[field])


def _group(name: str) -> str:
    """Return the WebDataset key of a member: its path up to the first dot of its file name."""
    folder, base = posixpath.split(name)
    return posixpath.join(folder, base.partition(".")[0])


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower()
