"""Uploading a run's checkpoints to its mirror while training goes on.

Rank 0 holds the newest durable checkpoint in the run's folder, by hard links, so that it stays while checkpoint.keep deletes it:

    runs/NAME/.mirror/step_00000200.5f1c/    the checkpoint's files; another name for each attempt
        sent-00003                           rank 3 has uploaded its own files; what went wrong, if it says anything

Every rank uploads its own files from there; when all have, rank 0 commits the checkpoint in the store, prunes what is there, and
takes the next. So all ranks work at the same one however slow they are, and need of each other only the folder that they share.
A failure is told in one line, and tried again with the next checkpoint. Nothing raises into training, which waits in `finish`.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread

from fluxray.errors import one_line
from fluxray.protocols import SavedCheckpoint
from fluxray.runtime.mirror import Mirror

FOLDER = ".mirror"
MARK = "sent-"
POLL_S = 0.2
FINAL_ATTEMPTS = 3
PROGRESS_S = 10.0

STOP_LIMIT_S = 60.0
"""How long a run that was asked to stop waits for its last checkpoint to be uploaded."""


class StoppedUploadError(Exception):
    """The run ends and does not wait for the upload."""


class Uploads:
    """One rank's share of the uploads. `open_mirror` is called in the thread, again after each failure.

    Does nothing, and waits for nothing, until it is started.
    """

    def __init__(self, run_dir: Path, place: tuple[int, int], keep: int, open_mirror: Callable[[], Mirror], address: str):
        self._run_dir = run_dir
        self._rank, self._num_ranks = place
        self._keep = keep
        self._open_mirror = open_mirror
        self._address = address
        self._notify: Callable[[str], None] = lambda _: None
        self._mirror: Mirror | None = None
        self._news: Queue[SavedCheckpoint | None] = Queue()
        self._num_news = self._num_settled = 0
        self._pending: dict[str, Path] = {}
        self._starts = self._ends = False
        self._beside_sent = False
        self._fault: str | None = None
        self._done_bytes = self._all_bytes = 0
        self._stop = Event()

    def start(self, notify: Callable[[str], None]) -> None:
        """Begin; before any rank saves. `notify` takes one line for the user, from a thread."""
        self._notify, self._starts = notify, True
        if self._rank == 0:
            shutil.rmtree(self._run_dir / FOLDER, ignore_errors=True)
        Thread(target=self._lead if self._rank == 0 else self._serve, name="fluxray-mirror", daemon=True).start()

    def follow(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Upload a checkpoint once it is durable; return it."""
        if self._rank == 0 and self._starts:
            self._tell(saved)
        return saved

    def finish(self, any_rank: Callable[[bool], bool], should_stop: Callable[[], bool], stopped: bool) -> None:
        """Wait until the mirror has the newest checkpoints or cannot have them, and say which. Collective.

        Waits STOP_LIMIT_S at most if the run has been `stopped`, or from when `should_stop` says so.
        """
        if not self._starts:
            return
        self._ends = True
        deadline = time.monotonic() + STOP_LIMIT_S if stopped else float("inf")
        for _ in range(FINAL_ATTEMPTS):
            self._tell(None)
            deadline, expired = self._await(any_rank, should_stop, deadline)
            if expired or not any_rank(self._rank == 0 and bool(self._pending)):
                break
        self.close()
        if self._rank == 0:
            shutil.rmtree(self._run_dir / FOLDER, ignore_errors=True)
        if self._pending:
            reason = self._fault or f"the run did not wait longer than {STOP_LIMIT_S:.0f} s"
            names = ", ".join(sorted(self._pending))
            again = f"the same command with name={self._run_dir.name} sends it"
            self._say(f"mirror: {self._address} lacks {names} ({reason}); {again}")

    def close(self) -> None:
        """End the thread after the chunk it is in."""
        self._stop.set()
        self._tell(None)

    def _say(self, text: str) -> None:
        with suppress(Exception):  # whoever listens may be gone, and the thread must not end of it
            self._notify(text)

    def _tell(self, saved: SavedCheckpoint | None) -> None:
        self._num_news += 1
        self._news.put(saved)

    def _await(self, any_rank: Callable[[bool], bool], should_stop: Callable[[], bool], deadline: float) -> tuple[float, bool]:
        """Wait until rank 0 has nothing left to try; return the deadline, and whether it has passed instead."""
        tells_at, pause = time.monotonic() + 1, POLL_S / 10
        while any_rank(self._rank == 0 and self._num_settled < self._num_news):
            now = time.monotonic()
            if any_rank(should_stop()):
                deadline = min(deadline, now + STOP_LIMIT_S)
            if any_rank(now >= deadline):
                return deadline, True
            if now >= tells_at:
                tells_at = now + PROGRESS_S
                share = f", {100 * self._done_bytes // self._all_bytes}%" if self._all_bytes else ""
                self._say(f"mirror: uploading to {self._address}{share}")
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        return deadline, False

    def _lead(self) -> None:
        """Rank 0's thread."""
        tried: set[str] = set()
        num_taken = 0
        while not self._stop.is_set():
            path = next((self._pending[name] for name in sorted(self._pending, reverse=True) if name not in tried), None)
            if path is None:
                self._num_settled = num_taken
            else:
                tried.add(path.name)
                self._attempt(path)
            for saved in self._take(wait=path is None):
                num_taken += 1
                tried.clear()
                self._add(saved)

    def _take(self, wait: bool) -> list[SavedCheckpoint | None]:
        taken = [self._news.get()] if wait else []
        while True:
            try:
                taken.append(self._news.get_nowait())
            except Empty:
                return taken

    def _add(self, saved: SavedCheckpoint | None) -> None:
        if saved is None:
            return
        try:
            saved.wait()
        except BaseException:  # noqa: BLE001 - raised where training waits for it
            return
        self._pending[saved.path.name] = saved.path
        for name in sorted(self._pending)[: -self._keep]:
            del self._pending[name]
            self._say(f"mirror: {self._address} does not get {name}: newer ones come first")

    def _attempt(self, path: Path) -> None:
        """Upload and commit one checkpoint, or say why not."""
        held = self._run_dir / FOLDER / f"{path.name}.{secrets.token_hex(4)}"
        try:
            _hold(path, held)
            mirror = self._opened()
            if not self._beside_sent:
                mirror.send_beside(self._run_dir)
                self._beside_sent = True
            self._send(held)
            self._await_marks(held)
            mirror.commit(held, path.name)
            del self._pending[path.name]
            self._fault = None
            mirror.prune(self._keep)
        except StoppedUploadError:
            return
        except Exception as error:  # noqa: BLE001 - whatever an upload meets must not reach training
            self._mirror = None
            self._fault = one_line(error)
            what = f"has not got {path.name}" if path.name in self._pending else "still has older checkpoints"
            if not path.is_dir():
                self._pending.pop(path.name, None)
            if not self._ends:
                self._say(f"mirror: {self._address} {what} ({self._fault}); tried again with the next one")
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _await_marks(self, held: Path) -> None:
        """Wait until every rank has uploaded its files; raises what one could not do."""
        marks = [held / f"{MARK}{rank:05d}" for rank in range(1, self._num_ranks)]
        while not all(mark.exists() for mark in marks):
            if self._stop.wait(POLL_S):
                raise StoppedUploadError
        for rank, mark in enumerate(marks, start=1):
            if fault := mark.read_text(encoding="utf-8"):
                raise OSError(f"worker {rank}: {fault}")

    def _serve(self) -> None:
        """The thread of every other rank."""
        done: set[str] = set()
        while not self._stop.wait(POLL_S):
            for held in sorted((self._run_dir / FOLDER).glob("step_*")):
                if held.name not in done and held.suffix != ".partial":
                    done.add(held.name)
                    self._serve_one(held)

    def _serve_one(self, held: Path) -> None:
        fault = ""
        try:
            self._send(held)
        except StoppedUploadError:
            return
        except Exception as error:  # noqa: BLE001 - told by rank 0
            self._mirror = None
            fault = one_line(error) or type(error).__name__
        try:
            making = held / f"making-{self._rank:05d}"
            making.write_text(fault, encoding="utf-8")
            making.rename(held / f"{MARK}{self._rank:05d}")
        except OSError:
            return  # rank 0 has given it up

    def _send(self, held: Path) -> None:
        own = [path.stat().st_size for path in held.glob(f"*-{self._rank:05d}-of-*")]
        self._done_bytes, self._all_bytes = 0, sum(own)
        self._opened().send(held, held.name.partition(".")[0], self._rank, self._count)

    def _count(self, num_bytes: int) -> None:
        if self._stop.is_set():
            raise StoppedUploadError
        self._done_bytes += num_bytes

    def _opened(self) -> Mirror:
        if self._mirror is None:
            self._mirror = self._open_mirror()
        return self._mirror


def _hold(path: Path, held: Path) -> None:
    """Link the files of a checkpoint into the new folder `held`, which appears whole; raises OSError if it is being deleted.

    A file system without hard links gets symbolic ones: a checkpoint that is deleted in the meantime is then not uploaded.
    """
    making = held.with_name(f"{held.name}.partial")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    for file in path.iterdir():
        try:
            os.link(file, making / file.name)
        except OSError:
            (making / file.name).symlink_to(file.resolve(strict=True))
    making.rename(held)
