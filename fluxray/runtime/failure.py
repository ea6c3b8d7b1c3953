"""Why Ray gave a run up, in one line."""

from pathlib import Path

from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError

from fluxray.runtime.outcome import FailedError, LostError, NoRoomError
from fluxray.runtime.paths import write_text

FAILURE_FILE = "failure.txt"


def explain(error: BaseException, run_dir: Path, silent: str | None = None) -> str:
    """Return one line on why Ray gave a run up, and write the whole story to the run's folder; `silent` names silent ranks."""
    write_text(run_dir / FAILURE_FILE, f"{type(error).__name__}: {error}\n")
    cause = f"Ray's controller failed: {_first_line(error.controller_failure if isinstance(error, ControllerError) else error)}"
    if _lacks_room(error):
        cause = "the cluster had no room for its workers"
    elif isinstance(error, WorkerGroupError) and error.worker_failures:
        rank, failure = _origin(error.worker_failures)
        cause = f"worker {rank} failed: {type(failure).__name__}: {_first_line(failure)}"
    elif isinstance(error, ActorDiedError):
        cause = "Ray's controller of the run died"
    if silent is not None:
        cause = f"{cause} ({silent})"
    return f"run {run_dir.name}: {cause}; the whole story is in {run_dir / FAILURE_FILE}"


def kind_of(error: BaseException) -> type[FailedError]:
    """Return what it is that Ray gave a run up for: no room on the cluster, a lost part of Ray, or the workers."""
    if _lacks_room(error):
        return NoRoomError
    return FailedError if isinstance(error, WorkerGroupError) else LostError


def _lacks_room(error: BaseException) -> bool:
    cause = error.controller_failure if isinstance(error, ControllerError) else None
    return type(cause).__name__ == "WorkerGroupStartupTimeoutError"  # which Ray keeps to itself


def _origin(failures: dict[int, Exception]) -> tuple[int, BaseException]:
    """Return rank and cause of the failure that began it: a lost worker or an own error, not a connection that a peer broke."""
    causes = {rank: _unwrapped(failure) for rank, failure in sorted(failures.items())}
    own = {
        rank: cause
        for rank, cause in causes.items()
        if "peer" not in str(cause) and "DistBackendError" not in type(cause).__name__
    }
    rank = min(own or causes)
    return rank, causes[rank]


def _unwrapped(failure: BaseException) -> BaseException:
    for name in ("_base_exc", "cause"):
        inner = getattr(failure, name, None)
        if isinstance(inner, BaseException):
            return inner
    return failure


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
