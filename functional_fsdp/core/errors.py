"""Errors for misuse at run time. Configuration errors are ``ValueError``; all have the words of ``unexpected``."""


def unexpected(where: str, expected: str, got: str, instead: str) -> str:
    """Return a message: where, what was expected, what came, and what to do."""
    return f"{where}: expected {expected}, got {got}; {instead}."


class FsdpError(RuntimeError):
    """Base of all run-time errors of this package."""


class HookOrderError(FsdpError):
    """A hook came out of turn."""


class IterationError(FsdpError):
    """A call needs a running iteration, or needs that there is none, or another key runs."""


class DivergenceError(FsdpError):
    """A replay left its order and the policy says to raise."""


class ByteBudgetError(FsdpError):
    """The units that must be open together do not fit the byte budget."""


class ResidencyError(FsdpError):
    """An effect does not fit the interpreter's table, e.g. a second gather of a resident unit."""


class PlaceholderError(FsdpError):
    """A resting parameter was computed with, written, or given away."""


class GradientError(FsdpError):
    """Gradients were read or written outside of their iteration, or are still outstanding."""


class DonatedStateError(FsdpError):
    """A state was used after an update took its tensors."""


class StaleGraphError(FsdpError):
    """A backward pass went through a graph of an earlier iteration."""


class PeerMismatch(FsdpError):
    """Ranks of one process group do not agree on what to run."""


class PeerFault(FsdpError):
    """A rank failed, ended, or did not come in time."""


class OutputTypeError(FsdpError):
    """A unit's output has a type in which tensors cannot be found."""


class CheckpointError(FsdpError, ValueError):
    """A checkpoint cannot be written, or is not what the program expects; most often a value does not fit."""
