"""How a run or a server ends without having done what it should, apart from the user's faults. Each message is one line."""


class FailedError(Exception):
    """It failed, and not by the user's fault."""


class LostError(FailedError):
    """A part of Ray was lost that it needs: no fault of what was run."""


class NoRoomError(FailedError):
    """It waited in vain for room on the cluster."""


class StoppedError(Exception):
    """It was stopped from outside, and can be resumed."""


FAILURE = 1
"""The exit code of what has failed."""


def ending(what: str, message: object) -> str:
    """Return the last line of a command that did not do what it should."""
    return f"fluxray: {what}: {message}"
