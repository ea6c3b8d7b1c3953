"""A run's copy in an object store: MIRROR/RUN/ with config.yaml, model/, tokenizer/ and its committed checkpoints.

    MIRROR/RUN/step_00000200/
        weights-..., exp_avg-..., ...      each rank's own, as in the run's folder
        index-00000-of-00008.json          after the other files of its rank, whose checksums it holds: it vouches for them
        checkpoint.json                    after every index is seen there as it is here; this is what commits it

No rank has to hear from another for that, and an interrupted upload is never taken for a checkpoint.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from fluxray.checkpoint import CheckpointReader
from fluxray.config.load import from_yaml
from fluxray.config.schema import TrainConfig
from fluxray.errors import CheckpointError, DamagedCheckpointError
from fluxray.objectstore import MissingError, ObjectStore, StoreError, open_store
from fluxray.runtime.checkpoints import BESIDE
from fluxray.runtime.identity import masked
from fluxray.runtime.paths import CONFIG_FILE

HEAD = "checkpoint.json"
OWN_FILE = re.compile(r"(checkpoint|index-\d+-of-\d+)\.json|\w+-\d+-of-\d+\.safetensors")
"""What a checkpoint is made of; nothing else is fetched."""

UNCOMMITTED = "is being uploaded, or its upload was interrupted"

NUM_TRANSFERS = 4
"""Files on the way at once, of one rank."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in the store; `path` is relative. `fault` says why it cannot be used, None if all is there in its size."""

    path: Path
    sizes: Mapping[str, int]
    saved_at: float
    num_ranks: int | None
    fault: str | None

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.path.name

    @property
    def state(self) -> str:
        """Complete or not, in words."""
        return "complete" if self.fault is None else self.fault if self.fault == UNCOMMITTED else f"damaged: {self.fault}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(self.sizes.values())


class Mirror:
    """The folder of the run `name` in a store. Every method but `fetch` raises StoreError where the store does not comply."""

    def __init__(self, store: ObjectStore, name: str):
        self.store = store
        self.name = name
        self.address = f"{store.address}/{name}"

    def checkpoints(self) -> list[RemoteCheckpoint]:
        """Return the checkpoints that are there, newest first, interrupted uploads too."""
        folders: dict[str, dict[str, Any]] = {}
        for path, info in self.store.sizes(self.name).items():
            folder, _, file = path.rpartition("/")
            if re.fullmatch(r"step_\d{8,}", folder):
                folders.setdefault(folder, {})[file] = info
        return [self._examine(folder, folders[folder]) for folder in sorted(folders, reverse=True)]

    def config(self) -> TrainConfig | None:
        """Return the configuration that the run was mirrored with, None if there is no such run."""
        with TemporaryDirectory() as scratch:
            try:
                self.store.download(f"{self.name}/{CONFIG_FILE}", Path(scratch) / CONFIG_FILE)
            except MissingError:
                return None
            return from_yaml(Path(scratch) / CONFIG_FILE)

    def send_beside(self, run_dir: Path) -> None:
        """Upload what evaluation and export need beside a checkpoint; the addresses in config.yaml without their passwords."""
        for part in BESIDE:
            for path in sorted((run_dir / part).rglob("*")):
                if path.is_file():
                    self.store.write(f"{self.name}/{path.relative_to(run_dir).as_posix()}", path.read_bytes())
        self.store.write(f"{self.name}/{CONFIG_FILE}", masked((run_dir / CONFIG_FILE).read_text(encoding="utf-8")).encode())

    def send(self, directory: Path, step: str, rank: int, progress: Callable[[int], None]) -> None:
        """Upload the files of checkpoint `step` that `rank` wrote, from `directory`; nothing if they are there already."""
        files = {name: size for name, size in _head(directory)["files"].items() if f"-{rank:05d}-of-" in name}
        index = next(name for name in files if name.startswith("index-"))
        folder = f"{self.name}/{step}"
        there = self.store.sizes(folder)
        if self._vouches(directory, step, index, files, there):
            return
        for name in (HEAD, index):  # first, so that neither vouches for what is being replaced
            if name in there:
                self.store.delete(f"{folder}/{name}")

        def upload(name: str) -> None:
            with (directory / name).open("rb") as source:
                self.store.upload(f"{folder}/{name}", source, progress)

        _all_of(upload, [name for name in files if name != index])
        self.store.write(f"{folder}/{index}", (directory / index).read_bytes())

    def commit(self, directory: Path, step: str) -> None:
        """Upload checkpoint.json if all that it names is there; StoreError says what is not."""
        head = (directory / HEAD).read_bytes()
        files: Mapping[str, int] = json.loads(head)["files"]
        folder = f"{self.name}/{step}"
        there = self.store.sizes(folder)
        for index in (name for name in files if name.startswith("index-")):
            rank = index.split("-")[1]
            if not self._vouches(directory, step, index, {n: s for n, s in files.items() if f"-{rank}-of-" in n}, there):
                raise StoreError(f"the files of worker {int(rank)} are not there")
        self.store.write(f"{folder}/{HEAD}", head)

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` complete checkpoints, and what is older than these."""
        found = self.checkpoints()
        kept = [remote.name for remote in found if remote.fault is None][:keep]
        for remote in found:
            if kept and remote.name < kept[-1]:
                self.store.delete(f"{self.name}/{remote.name}/{HEAD}")
                self.store.delete_folder(f"{self.name}/{remote.name}")

    def fetch(self, run_dir: Path, notify: Callable[[str], None]) -> Path | None:
        """Download the newest complete checkpoint into the run's folder; None if there is none.

        It is verified before it gets its name: a damaged one is passed over, and `notify` told. Raises CheckpointError if all are
        damaged, the store does not answer or the disk refuses.
        """
        faults: list[str] = []
        try:
            for remote in self.checkpoints():
                if remote.fault == UNCOMMITTED:
                    continue
                fault = remote.fault or self._fetch_one(remote, run_dir)
                if fault is None:
                    for earlier in faults:
                        notify(f"{earlier}; using {remote.name} instead")
                    notify(f"fetched {remote.name} from {self.address}")
                    return run_dir / remote.name
                faults.append(f"checkpoint.mirror: {self.address}/{remote.name} is damaged ({fault})")
        except StoreError as error:
            raise CheckpointError(f"checkpoint.mirror: {self.address} cannot be read ({error}); try again") from None
        if faults:
            remedy = "set another name to start anew"
            raise DamagedCheckpointError(f"{faults[0]}; no earlier one there is complete either; {remedy}")
        return None

    def fetch_beside(self, run_dir: Path) -> None:
        """Download model/ and tokenizer/."""
        for path in self.store.sizes(self.name):
            parts = PurePosixPath(path).parts
            if parts[0] in BESIDE and ".." not in parts:
                target = run_dir.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.store.download(f"{self.name}/{path}", target)

    def _fetch_one(self, remote: RemoteCheckpoint, run_dir: Path) -> str | None:
        """Download and verify one checkpoint; return what is wrong with it."""
        final = run_dir / remote.name
        partial = final.with_name(f"{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            names = [name for name in remote.sizes if OWN_FILE.fullmatch(name)]
            _all_of(lambda name: self.store.download(f"{self.name}/{remote.name}/{name}", partial / name), names)
            CheckpointReader(partial).verify()
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        except (MissingError, CheckpointError) as error:
            return str(error).removeprefix(f"checkpoint {partial}: ")
        except OSError as error:
            raise CheckpointError(
                f"storage: {final} cannot be written ({error.strerror}); free space there or name another storage"
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return None

    def _examine(self, folder: str, found: Mapping[str, Any]) -> RemoteCheckpoint:
        sizes = {name: info.size for name, info in found.items()}
        saved_at = max((info.mtime_ns or 0) / 1e9 for info in found.values())
        num_ranks, fault = None, UNCOMMITTED
        if HEAD in found:
            try:
                head = json.loads(self.store.read(f"{self.name}/{folder}/{HEAD}"))
                num_ranks = int(head["num_ranks"])
                wrong = [name for name, size in head["files"].items() if sizes.get(name) != size]
                fault = f"{wrong[0]} is {'truncated' if wrong[0] in sizes else 'missing'}" if wrong else None
            except MissingError:
                fault = UNCOMMITTED
            except (ValueError, KeyError, TypeError, AttributeError):
                fault = f"{HEAD} is damaged"
        return RemoteCheckpoint(Path(folder), sizes, saved_at, num_ranks, fault)

    def _vouches(self, directory: Path, step: str, index: str, files: Mapping[str, int], there: Mapping[str, Any]) -> bool:
        """Whether the `files` of one rank are in the store in their sizes, with the very index that is in `directory`."""
        if any(name not in there or there[name].size != size for name, size in files.items()):
            return False
        return self.store.read(f"{self.name}/{step}/{index}") == (directory / index).read_bytes()


def of_run(config: TrainConfig, name: str) -> Mirror:
    """Return the mirror of the run `name`, whose `checkpoint.mirror` is set. Raises ConfigError, StoreError."""
    assert config.checkpoint.mirror is not None, "there is no mirror"
    return Mirror(open_store(config.checkpoint.mirror), name)


def _head(directory: Path) -> Mapping[str, Any]:
    return json.loads((directory / HEAD).read_bytes())


def _all_of(action: Callable[[str], None], names: Sequence[str]) -> None:
    """Do `action` for all names, some at a time; raise the first fault, once none is under way any more."""
    with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="fluxray-mirror") as pool:
        for future in [pool.submit(action, name) for name in names]:
            future.result()
