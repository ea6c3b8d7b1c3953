"""Files in an object store, S3, Google's or a folder, through pyarrow. Credentials come from the environment alone.

Every call is bounded: a server that says nothing is given up after half a minute. What goes wrong is a StoreError in one line.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qsl, urlsplit

from pyarrow import NativeFile, fs

from fluxray.config.mirror import check_mirror
from fluxray.errors import ConfigError, one_line

CONNECT_S, SILENCE_S, ATTEMPTS = 5, 10, 3
CHUNK_BYTES = 8 << 20
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
PLACE_VARIABLES = (*ENDPOINT_VARIABLES, *REGION_VARIABLES)
"""What says where a store is, without a secret: workers on other nodes get it from the driver."""

DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|EXPIRED|FORBIDDEN|\b40[13]\b|PERMISSION_DENIED|UNAUTHENTICATED|OAuth2"
)
ABSENT = re.compile(r"NO_SUCH_BUCKET|Bucket '.*' not found|bucket does not exist", re.IGNORECASE)
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account",
}


class StoreError(Exception):
    """The store has not done what was asked; the text is one line without credentials."""


class MissingError(StoreError):
    """There is no such object."""


@dataclass(frozen=True)
class ObjectStore:
    """A place in a store: `address` as the user wrote it, without a query; `root` as the file system names it."""

    address: str
    scheme: str
    filesystem: fs.FileSystem
    root: str

    def sizes(self, folder: str) -> Mapping[str, fs.FileInfo]:
        """Return the files under `folder`, by their path below it; none if there is no such folder."""
        base = f"{self.root}/{folder}".rstrip("/")
        with _told():
            found = self.filesystem.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
        return {info.path.removeprefix(f"{base}/"): info for info in found if info.type == fs.FileType.File}

    def read(self, path: str) -> bytes:
        """Return the content of a small object; raises MissingError."""
        with _told(), self.filesystem.open_input_stream(f"{self.root}/{path}") as source:
            return source.read()

    def info(self, path: str) -> fs.FileInfo:
        """Return size and time of an object; raises MissingError."""
        with _told():
            info = self.filesystem.get_file_info(f"{self.root}/{path}")
        if info.type != fs.FileType.File:
            raise MissingError("there is no such object")
        return info

    def open(self, path: str) -> NativeFile:
        """Return an object to read parts of; raises MissingError."""
        with _told():
            return self.filesystem.open_input_file(f"{self.root}/{path}")

    @staticmethod
    def read_at(file: NativeFile, start: int, size: int) -> bytes:
        """Return bytes of what `open` has returned, as many as there are; safe from several threads."""
        with _told():
            return file.read_at(size, start)

    def download(self, path: str, target: Path) -> None:
        """Write an object to the file `target`, durably; raises MissingError, and OSError if the disk refuses."""
        with target.open("wb") as sink:
            with _told():
                source = self.filesystem.open_input_stream(f"{self.root}/{path}")
            with source:
                while chunk := self._next_chunk(source):
                    sink.write(chunk)
            os.fsync(sink.fileno())

    def write(self, path: str, content: bytes) -> None:
        """Write a small object in one request."""
        with _told(), self._open(path) as sink:
            sink.write(content)

    def upload(self, path: str, source: BinaryIO, progress: Callable[[int], None]) -> None:
        """Write an object from an open file. `progress` is told the bytes of each chunk, and may raise to end it.

        An upload that was ended may leave an object cut short.
        """
        with _told():
            sink = self._open(path)
        try:
            while chunk := source.read(CHUNK_BYTES):
                with _told():
                    sink.write(chunk)
                progress(len(chunk))
        finally:
            with _told():
                sink.close()

    def delete(self, path: str) -> None:
        """Delete an object; one that is not there is as good."""
        try:
            with _told():
                self.filesystem.delete_file(f"{self.root}/{path}")
        except MissingError:
            return

    def delete_folder(self, folder: str) -> None:
        """Delete all objects under a folder."""
        with _told():
            self.filesystem.delete_dir(f"{self.root}/{folder}")

    def check(self, folder: str, key: str = "checkpoint.mirror") -> None:
        """Write and delete an object under `folder`. ConfigError without bucket or access, StoreError if nothing answers."""
        if self.scheme == "file" and not Path(self.root).is_dir():
            raise ConfigError(f"{key}: {self.address} is no folder; make it, or name another")
        try:
            self.write(f"{folder}/.check", b"")
            self.delete(f"{folder}/.check")
        except StoreError as error:
            raise _user_fault(self, str(error), key) or error from None

    def _open(self, path: str):
        full = f"{self.root}/{path}"
        if isinstance(self.filesystem, fs.LocalFileSystem):
            Path(full).parent.mkdir(parents=True, exist_ok=True)
        return self.filesystem.open_output_stream(full)

    @staticmethod
    def _next_chunk(source: BinaryIO) -> bytes:
        with _told():
            return source.read(CHUNK_BYTES)


def open_store(address: str, key: str = "checkpoint.mirror") -> ObjectStore:
    """Return the store that `address` names, the value of `key`.

    ConfigError if it cannot be one, StoreError if its bucket is not found.

    The endpoint of S3 is that of the query (`endpoint_override`), else of AWS_ENDPOINT_URL, else Amazon's own.
    """
    check_mirror(address, key)
    parts = urlsplit(address)
    options = dict(parse_qsl(parts.query))
    shown = address.partition("?")[0].rstrip("/")
    root = parts.path.rstrip("/") if parts.scheme == "file" else f"{parts.netloc}{parts.path}".strip("/")
    try:
        with _told():
            filesystem = _filesystem(parts.scheme, parts.netloc, options)
    except StoreError as error:
        raise _user_fault(ObjectStore(shown, parts.scheme, fs.LocalFileSystem(), root), str(error), key) or error from None
    return ObjectStore(shown, parts.scheme, filesystem, root)


def _filesystem(scheme: str, bucket: str, options: Mapping[str, str]) -> fs.FileSystem:
    if scheme == "file":
        return fs.LocalFileSystem()
    if scheme == "gs":
        limit = timedelta(seconds=SILENCE_S * ATTEMPTS)
        return fs.GcsFileSystem(
            endpoint_override=options.get("endpoint_override"), scheme=options.get("scheme", "https"), retry_time_limit=limit
        )
    endpoint = options.get("endpoint_override") or _first_set(ENDPOINT_VARIABLES)
    scheme, host = endpoint.split("://", 1) if endpoint and "://" in endpoint else ("https", endpoint)
    region = options.get("region") or _first_set(REGION_VARIABLES)
    if region is None:
        region = "us-east-1" if endpoint else fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        endpoint_override=host.rstrip("/") if host else None,
        scheme=options.get("scheme", scheme),
        connect_timeout=CONNECT_S,
        request_timeout=SILENCE_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # a small object is one request
    )


def _first_set(variables: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in variables if os.environ.get(name)), None)


def _user_fault(store: ObjectStore, reason: str, key: str) -> ConfigError | None:
    """Return what the user has to mend, None if only time can."""
    if ABSENT.search(reason):
        return ConfigError(f"{key}: {store.address} names a bucket that does not exist; make it, or name another")
    if DENIED.search(reason) or "Permission denied" in reason:
        remedy = CREDENTIALS.get(store.scheme, "the rights of the folder")
        return ConfigError(f"{key}: {store.address} refuses access ({reason}); check {remedy}")
    return None


@contextmanager
def _told() -> Iterator[None]:
    """Turn what pyarrow raises into a StoreError."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(_reason(error)) from None
    except OSError as error:
        raise StoreError(_reason(error)) from None


def _reason(error: OSError) -> str:
    """Return the heart of pyarrow's message: what the service said, or why it was not reached."""
    text = re.sub(r"\s*\(Request ID: .*", "", one_line(error, 2000))
    if said := re.search(r"AWS Error (.+?) during \w+ operation:(.*)", text):
        return one_line(OSError(f"{said[1]}: {said[2].rpartition('Details: ')[2].strip()}".removesuffix(": ")))
    if "with a last message of " in text:
        text = text.rpartition("with a last message of ")[2].partition(" Learn more")[0]
    return one_line(OSError(re.sub(r"\[Errno \d+\] | Detail: \[errno.*", "", text)))
