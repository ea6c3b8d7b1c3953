"""One line of `fluxray doctor`."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """What was looked at, how it is, what was found, and what to do about it (nothing where it is ok)."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
