"""Pictures in WebDataset tars of an object store or behind a web server."""

import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from fluxray.data.decode import Quarantined
from fluxray.data.folders import RemoteFolder, open_remote
from fluxray.data.picture_tars import count_ignored, expand_braces, tar_samples
from fluxray.data.pictures import Loaded, PictureRef, Place, unique_key
from fluxray.errors import DataError


@dataclass(frozen=True)
class RemoteTars:
    """The pictures of all tars, uncompressed, that `pattern` names: an address with {0000..0099}, {a,b}, in a store * too.

    Listing reads each tar once from its first byte to its last, several at a time, and keeps none of it; a picture is then one
    range of bytes. Where a store cannot be read at all, that is a DataError, and no fault of a picture.
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
        taken: set[str] = set()
        for path, (refs, _) in zip(self._files, self._listed, strict=True):
            yield from (_numbered(ref, path, taken) for ref in refs)

    def load(self, place: Place) -> bytes:
        """Return the bytes of a member; raises Quarantined, or DataError."""
        try:
            data = self._folders[posixpath.dirname(place.path)].part(
                posixpath.basename(place.path), (place.start or 0, place.size or 0)
            )
        except FileNotFoundError:
            raise Quarantined("missing", "the file is not there") from None
        if len(data) != place.size:
            raise Quarantined("truncated", f"{len(data)} of {place.size} bytes are there")
        return data

    def stream(self) -> Iterator[tuple[PictureRef, Loaded]]:
        """Yield all pictures with their bytes; each tar is read once, from its first byte to its last."""
        taken: set[str] = set()
        for path in self._files:
            with self._open(path) as file:
                for ref, data in tar_samples(file, path, self.caption_key, self.masks, with_bytes=True):
                    loaded = data if data is not None else Quarantined("unreadable", ref.fault or "")
                    yield _numbered(ref, path, taken), loaded

    def stamp(self, place: Place) -> list[int | str]:
        """Return size and time, or what the server calls the version, of a tar, asked for once."""
        if place.path not in self._stamps:
            try:
                found = self._folders[posixpath.dirname(place.path)].stamp(posixpath.basename(place.path))
            except FileNotFoundError:
                found = []
            self._stamps[place.path] = found
        return self._stamps[place.path]

    def ignored(self) -> Mapping[str, int]:
        """Return how many other members there are, by the end of their name."""
        return +sum((counts for _, counts in self._listed), Counter[str]())

    @cached_property
    def _listed(self) -> list[tuple[list[PictureRef], Counter[str]]]:
        """Of each tar its pictures and what is ignored."""
        return next(iter(self._folders.values())).each(self._list, self._files)

    def _list(self, path: str) -> tuple[list[PictureRef], Counter[str]]:
        counts: Counter[str] = Counter()
        with self._open(path) as file:
            samples = tar_samples(
                file,
                path,
                self.caption_key,
                self.masks,
                with_bytes=False,
                seen=lambda name: count_ignored(counts, name, self.masks),
            )
            return [ref for ref, _ in samples], counts

    def _open(self, path: str) -> Any:
        try:
            return self._folders[posixpath.dirname(path)].open(posixpath.basename(path))
        except FileNotFoundError:
            raise DataError(f"{self.config_key}: tars:{path}: is no file, and matches none; check the address") from None

    @cached_property
    def _stamps(self) -> dict[str, list[int | str]]:
        return {}

    @cached_property
    def _folders(self) -> dict[str, RemoteFolder]:
        """The folders of the tars, by their addresses without a query."""
        address, _, query = self.pattern.partition("?")
        folders = dict.fromkeys(posixpath.dirname(path) for path in expand_braces(address))
        return {folder: open_remote(f"{folder}?{query}" if query else folder, self.config_key) for folder in folders}

    @cached_property
    def _files(self) -> list[str]:
        found: list[str] = []
        for path in expand_braces(self.pattern.partition("?")[0]):
            folder, wanted = posixpath.split(path)
            matching = [wanted]
            if set("*[") & set(wanted):
                matching = [name for name in self._folders[folder].names() if fnmatchcase(name, wanted)]
            if not matching:
                raise DataError(f"{self.config_key}: tars:{path}: is no file, and matches none; check the address")
            found += [posixpath.join(folder, name) for name in matching]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTars, (self.pattern, self.config_key, self.caption_key, self.masks)


def _numbered(ref: PictureRef, path: str, taken: set[str]) -> PictureRef:
    key = unique_key(ref.key, taken, posixpath.basename(path).partition(".")[0])
    taken.add(key)
    return replace(ref, key=key)
