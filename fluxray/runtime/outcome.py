"""How a run or a server ends without having done what it should, apart from the user's faults. Each message is one line."""


class FailedError(Exception):
    """It failed, and not by the user's fault."""


class StoppedError(Exception):
    """It was stopped from outside, and can be resumed."""
