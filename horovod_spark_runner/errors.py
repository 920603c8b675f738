"""Every exception this package raises.

::

    HorovodSparkError
    ├── InvalidInputError (also a ValueError)   an argument is invalid
    │   ├── DataError                           columns, types or values of the DataFrame
    │   ├── ModelError                          model_fn, or the model it returned
    │   ├── RunDirectoryError                   the run directory, or its contents
    │   └── UnreachableError                    storage that may be unreachable for a while only
    ├── EnvironmentProblem                      something is not installed or set up
    ├── StorageError (also an OSError)          a file could not be saved
    ├── NotEnoughSlotsError                     Spark has too few slots
    └── RunFailedError                          a distributed run ended without a result
        ├── RankFailedError                     a rank raised, exited, was killed or lost
        ├── StalledError                        no rank made any progress
        ├── RunCancelledError                   someone cancelled its Spark job
        ├── LaunchError                         the ranks could not be started or lost Spark
        ├── RanksDivergedError                  ranks hold different models
        ├── CheckpointError                     checkpoints or rows could not be written or read
        └── PreemptedError                      a rank got SIGTERM; a checkpoint was saved

The branches differ by who can fix the problem: the caller (``InvalidInputError``), the cluster's
administrator (``EnvironmentProblem``, ``StorageError``, ``NotEnoughSlotsError``), or the author of
the training code (``RankFailedError``). Every exception can be pickled, with its fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

# Characters of a value in a message.
_LONGEST = 200
# Colour codes of terminals.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Control characters, also those that change the direction of text, and lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


# Keys of object stores may hold slashes.
_SECRET_OF_URL = re.compile(
    r"\b((?:s3[an]?|oss|cos[n]?)://)[^\s'\"/:@]+:[^\s'\"@]+@|\b(\w+://)[^\s'\"/:@]+:[^\s'\"/@]+@"
)


def printable(text: object) -> str:
    """Return ``text`` for a terminal: control characters escaped, without secrets of URLs."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], _redact_urls(str(text)))


def _redact_urls(text: str) -> str:
    """Return ``text`` without user names and passwords in its URLs."""
    return _SECRET_OF_URL.sub(lambda match: f"{match[1] or match[2]}***@", text)


def one_line(text: object) -> str:
    """Return ``text`` as one line for a terminal; see `printable`."""
    return printable(text).replace("\n", "\\n")


def escaped(error: E) -> E:
    """Make the message of a foreign error `printable`: tracebacks show it as a cause."""
    error.args = tuple(printable(one) if isinstance(one, str) else one for one in error.args)
    if isinstance(error, OSError) and isinstance(error.strerror, str):
        error.strerror = printable(error.strerror)
    return error


class HorovodSparkError(Exception):
    """Base of every error raised by horovod_spark_runner; its text is `printable`."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InvalidInputError(HorovodSparkError, ValueError):
    """An argument is invalid; raised before the first step."""


class DataError(InvalidInputError):
    """The DataFrame's columns, types or values do not fit the training.

    Attributes:
        row: stored values of the row that cannot be read, by column, with the MD5 of encoded bytes;
            empty if the error does not concern a single row.
    """

    row: Mapping[str, Any] = MappingProxyType({})


class ModelError(InvalidInputError):
    """``model_fn`` or the model it returned cannot be trained on these columns."""


class RunDirectoryError(InvalidInputError):
    """The run directory cannot be used, or holds another run."""


class UnreachableError(InvalidInputError):
    """Storage cannot be reached, and no missing configuration of this process is the cause."""


class EnvironmentProblem(HorovodSparkError):
    """A program or package is missing, or was built wrong."""


class StorageError(HorovodSparkError, OSError):
    """Storage failed while something was saved or exported; earlier files are unchanged."""


class NotEnoughSlotsError(HorovodSparkError):
    """Spark cannot run as many tasks at once as the requested ranks.

    Attributes:
        requested: slots that the run needs.
        available: slots that Spark has.
    """

    def __init__(self, message: str, *, requested: int, available: int) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {"requested": self.requested, "available": self.available}
        return _rebuild, (type(self), str(self), fields)


class RunFailedError(HorovodSparkError):
    """A distributed run ended without a result."""


class LaunchError(RunFailedError):
    """The ranks could not be started, or Spark lost them."""


class RunCancelledError(RunFailedError):
    """The run's Spark job was cancelled, at Spark's UI or through its API."""


class StalledError(RunFailedError):
    """No rank made any progress for ``stall_timeout``; the message holds all Python stacks.

    Attributes:
        stacks: the Python stacks of each rank's threads, by rank.
    """

    def __init__(self, message: str, *, stacks: dict[int, str]) -> None:
        super().__init__(message)
        self.stacks = stacks

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {"stacks": self.stacks})


class RanksDivergedError(RunFailedError):
    """The ranks no longer hold the same model; the message names the variables that differ."""


class CheckpointError(RunFailedError):
    """Storage failed: a checkpoint, or rows, could not be written or read; others are unchanged."""


class PreemptedError(RunFailedError):
    """A rank got SIGTERM; a checkpoint of the last step was saved."""


class RankFailedError(RunFailedError):
    """A rank raised an exception, exited, was killed, or was lost with its Spark task.

    The message names the first failing rank, its host and its exception with the remote
    traceback, then what the other ranks did. ``__cause__`` is the remote exception itself where
    it could be pickled.

    Attributes:
        rank: rank that failed first.
        host: host it ran on.
        exception_type: qualified name of the remote exception, or ``None`` if it was killed.
        remote_traceback: its formatted traceback, possibly empty.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        host: str,
        exception_type: str | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exception_type = exception_type
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {
            "rank": self.rank,
            "host": self.host,
            "exception_type": self.exception_type,
            "remote_traceback": self.remote_traceback,
        }
        return _rebuild, (type(self), str(self), fields)


def brief(value: object) -> str:
    """Return the ``repr`` of ``value`` for a message, shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def on_one_line(text: object, longest: int = 500) -> str:
    """Return the text of a foreign error on one line, shortened and without colours."""
    return " ".join(_COLOURS.sub("", str(text)).split())[:longest]


def _rebuild(cls: type[HorovodSparkError], message: str, fields: dict[str, Any]) -> object:
    """Build an exception with keyword-only fields again, for pickle."""
    return cls(message, **fields)
