"""The user's faults. Each message is one line that names the key, the value and the remedy.

The command line prints the message of any `FluxrayError` without a traceback and exits with code 2. Faults of fluxray itself
are ordinary exceptions and keep their traceback.
"""


class FluxrayError(Exception):
    """Base of the faults that a user can mend."""


class ConfigError(FluxrayError):
    """A configuration key has a value that cannot be honoured."""


class PlanError(FluxrayError):
    """What was asked for does not fit the hardware: GPUs, CPUs, device, host or disk memory."""


class DataError(FluxrayError):
    """A data source is missing, empty, unreadable or does not fit the model."""


class CheckpointError(FluxrayError):
    """A checkpoint is missing, damaged, of another model or of another format version."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint cannot be read as it was written; an earlier one may."""


class NonFiniteLossError(FluxrayError):
    """The loss or the gradient is no number; trying again from the last checkpoint would only end there again."""


class OutOfMemory(Exception):
    """A worker's device had not the memory: no fault of the user's, since the run can go on in another cut.

    The message says where it was, on which rank and how much was taken: `in step 12 (rank 0, 43.1 of 45.0 GB)`.
    """


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the text of another library's error on one line of at most `limit` characters, for use inside a message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
