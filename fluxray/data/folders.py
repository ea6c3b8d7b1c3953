"""Folders that encoded data is read from: of this machine's file systems, of an object store, or of a web server.

Of a file that is far away only ranges of bytes are read, several at a time where nobody needs them in turn. A read that fails is
tried again for some seconds; then it is a DataError of one line, and the same command goes on where the run has saved.
"""

import io
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import urlsplit

from fluxray.config.mirror import check_mirror
from fluxray.errors import ConfigError, DataError, one_line
from fluxray.objectstore import DENIED, SILENCE_S, MissingError, ObjectStore, StoreError, open_store

READERS = 16
"""Reads of one process that wait for a store at the same time."""

PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Before a read that has failed is tried again."""

STREAM_BYTES = 8 << 20
"""Of a file that is read from its first byte to its last, in one request."""

Extent = tuple[int, int]
"""First byte and number of bytes."""

A = TypeVar("A")
B = TypeVar("B")


def is_remote(reference: str) -> bool:
    """Return whether a reference names a store or a web server."""
    return re.match(r"(s3|gs|https?)://", reference) is not None


def check_remote(address: str, config_key: str) -> None:
    """Raise ConfigError unless an address names a place in a store or of a web server, without credentials."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https"):
        check_mirror(address, config_key)
        return
    if "@" in parts.netloc or parts.query:
        what = "credentials" if "@" in parts.netloc else "a query"
        raise ConfigError(f"{config_key}: holds {what}, which would be kept with the run; name a place that needs none")
    if not parts.netloc or parts.fragment:
        raise ConfigError(f"{config_key}: {address!r} is no address; use {parts.scheme}://HOST/FOLDER")


class Folder(Protocol):
    """Some files, by name; reading is safe from several threads. It can be pickled."""

    @property
    def name(self) -> str:
        """How errors name it."""
        ...

    @property
    def readers(self) -> int:
        """How many reads at a time are worth it."""
        ...

    def read(self, name: str) -> bytes:
        """Return a whole small file; raises OSError, among them FileNotFoundError."""
        ...

    def size(self, name: str) -> int:
        """Return the number of bytes of a file; raises OSError."""
        ...

    def parts(self, name: str, extents: Sequence[Extent]) -> list[bytearray]:
        """Return these bytes of a file, in order; those that it lacks are 0. Raises OSError."""
        ...

    def each(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Return what `function` makes of each item, in order; it may be called from several threads."""
        ...


class LocalFolder:
    """A folder of a file system."""

    readers = 1

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def name(self) -> str:
        """See Folder."""
        return str(self.folder)

    def read(self, name: str) -> bytes:
        """See Folder."""
        return (self.folder / name).read_bytes()

    def size(self, name: str) -> int:
        """See Folder."""
        return (self.folder / name).stat().st_size

    def parts(self, name: str, extents: Sequence[Extent]) -> list[bytearray]:
        """See Folder."""
        with (self.folder / name).open("rb", buffering=0) as file:
            return [_filled(file, start, size) for start, size in extents]

    def each(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """See Folder."""
        return list(map(function, items))


class RemoteFolder(ABC):
    """A folder far away; DataError where it cannot be read, FileNotFoundError where only the file is missing."""

    readers = READERS

    def __init__(self, address: str, config_key: str):
        check_remote(address, config_key)
        self._address, self._config_key = address, config_key

    @property
    def name(self) -> str:
        """See Folder."""
        return self._address.partition("?")[0].rstrip("/")

    def read(self, name: str) -> bytes:
        """See Folder."""
        return self._again(name, lambda: self._read(name, None))

    def size(self, name: str) -> int:
        """See Folder."""
        return self._again(name, lambda: self._size(name))

    def stamp(self, name: str) -> list[int | str]:
        """Return what tells a file from another one of its name: size and time, or what the server calls its version."""
        return self._again(name, lambda: [self._size(name), self._version(name)])

    def parts(self, name: str, extents: Sequence[Extent]) -> list[bytearray]:
        """See Folder. What lies close together comes in one request."""
        first, end = min(start for start, _ in extents), max(start + size for start, size in extents)
        if end - first > 2 * sum(size for _, size in extents):
            return [bytearray(self.part(name, one).ljust(one[1], b"\0")) for one in extents]
        whole = self.part(name, (first, end - first)).ljust(end - first, b"\0")
        return [bytearray(whole[start - first : start - first + size]) for start, size in extents]

    def part(self, name: str, one: Extent) -> bytes:
        """Return some bytes of a file, as many as there are."""
        return self._again(name, lambda: self._read(name, one)) if one[1] else b""

    def open(self, name: str) -> BinaryIO:
        """Return a file that is read from its first byte to its last."""
        return io.BufferedReader(_Stream(self, name), STREAM_BYTES)

    def each(self, function: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """See Folder."""
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(function, items))

    @abstractmethod
    def names(self) -> list[str]:
        """Return the files in the folder itself."""

    @abstractmethod
    def _read(self, name: str, one: Extent | None) -> bytes: ...

    @abstractmethod
    def _size(self, name: str) -> int: ...

    @abstractmethod
    def _version(self, name: str) -> int | str: ...

    def _again(self, name: str, read: Callable[[], A]) -> A:
        """Return what `read` returns, at the latest when it has failed for some seconds."""
        for pause in (*PAUSES_S, None):
            try:
                return read()
            except MissingError:
                raise FileNotFoundError(2, "it is not there", f"{self.name}/{name}") from None
            except StoreError as error:
                refused = DENIED.search(str(error))
                if pause is None or refused:
                    remedy = "check its rights and credentials" if refused else "check the network; the same command goes on"
                    raise DataError(f"{self._config_key}: {self.name}/{name} cannot be read ({error}); {remedy}") from None
            time.sleep(pause)
        raise AssertionError("the last pause is None")


class StoreFolder(RemoteFolder):
    """A folder of an object store."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreFolder, (self._address, self._config_key)

    def names(self) -> list[str]:
        """See RemoteFolder."""
        return sorted(name for name in self._again("", lambda: self._store.sizes("")) if "/" not in name)

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self._address, self._config_key)

    @cached_property
    def _opened(self) -> dict[str, Any]:
        return {}

    def _read(self, name: str, one: Extent | None) -> bytes:
        if one is None:
            return self._store.read(name)
        if name not in self._opened:  # asks for its size, once
            self._opened[name] = self._store.open(name)
        return self._store.read_at(self._opened[name], one[0], one[1])

    def _size(self, name: str) -> int:
        return self._store.info(name).size

    def _version(self, name: str) -> int | str:
        return self._store.info(name).mtime_ns or 0


class WebFolder(RemoteFolder):
    """A folder of a web server, which must serve ranges of bytes (RFC 9110, 14)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return WebFolder, (self._address, self._config_key)

    def names(self) -> list[str]:
        """See RemoteFolder: a web server tells nobody."""
        raise DataError(
            f"{self._config_key}: {self.name}: a web server does not tell which files it has; write their names, such as "
            f"{{000..127}}"
        )

    @cached_property
    def _client(self) -> Any:
        import aiohttp
        from fsspec.implementations.http import HTTPFileSystem

        limits = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        return HTTPFileSystem(encoded=True, skip_instance_cache=True, client_kwargs={"timeout": limits, "trust_env": True})

    def _read(self, name: str, one: Extent | None) -> bytes:
        url = f"{self.name}/{name}"
        if one is None:
            return self._told(lambda: self._client.cat_file(url))
        data = self._told(lambda: self._client.cat_file(url, one[0], one[0] + one[1]))
        if len(data) > one[1]:
            raise self._no_ranges(name)
        return data

    def _version(self, name: str) -> int | str:
        found = self._told(lambda: self._client.info(f"{self.name}/{name}"))
        return found.get("ETag") or found.get("Last-Modified") or ""

    def _size(self, name: str) -> int:
        found = self._told(lambda: self._client.info(f"{self.name}/{name}"))
        if found.get("size") is None or found.get("partial") is False:
            raise self._no_ranges(name)
        return found["size"]

    def _no_ranges(self, name: str) -> DataError:
        return DataError(
            f"{self._config_key}: {self.name}/{name}: the server does not serve ranges of bytes; use one that does, or copy the "
            f"files to a folder"
        )

    @staticmethod
    def _told(call: Callable[[], Any]) -> Any:
        """Turn what the client raises into a StoreError."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - of aiohttp, fsspec and sockets
            why = error.__cause__ if isinstance(error, FileNotFoundError) else error  # fsspec says that of any fault
            status = getattr(why, "status", None)
            if why is None or status in (404, 410):
                raise MissingError("it is not there") from None
            text = one_line(why) if isinstance(why, Exception) else str(why)
            raise StoreError(f"{status} {getattr(why, 'message', '')}".strip() if status else text) from None


class _Stream(io.RawIOBase):
    """A file far away from its first byte to its last; a request that failed is made again where it stood."""

    def __init__(self, folder: RemoteFolder, name: str):
        self._folder, self._name = folder, name
        self._size, self._at = folder.size(name), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        data = self._folder.part(self._name, (self._at, wanted))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_folder(reference: Path | str, config_key: str) -> Folder:
    """Return the folder that a path or an address names; ConfigError for an address that cannot be one."""
    return LocalFolder(reference) if isinstance(reference, Path) else open_remote(reference, config_key)


def open_remote(address: str, config_key: str) -> RemoteFolder:
    """Return the folder at an address."""
    return (WebFolder if address.startswith("http") else StoreFolder)(address, config_key)


def _filled(file: io.FileIO, start: int, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    file.seek(start, os.SEEK_SET)
    while view and (count := file.readinto(view)):
        view = view[count:]
    return content
