"""Validate records of a run directory. Pure.

A file may be cut short, or damaged within. Such a record is not shown at all: a part of its calls
would look like all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ..typed_json import read_fields
from .retry_policy import Attempt

Check: TypeAlias = Callable[[object], bool]


@dataclass(frozen=True)
class _Account:
    ranks: list[int]
    seconds: dict[str, list[float]]
    mean: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rank:
    rank: int
    host: str
    slot: int
    gpus: list[str]


@dataclass(frozen=True)
class _Call:
    seconds: dict[str, float]
    ended: float = 0.0
    placement: list[_Rank] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    workers: int = 0


@dataclass(frozen=True)
class _Fit:
    epochs: int = 0
    batch_size: int = 0


@dataclass(frozen=True)
class _Sync:
    sync: str = ""


@dataclass(frozen=True)
class _Settings:
    fit: _Fit = _Fit()
    num_workers: int = 0
    rows: int = 0
    sync: _Sync = _Sync()


def _has_fields(value: object, cls: type[object]) -> bool:
    try:
        read_fields(value, cls)
    except ValueError:
        return False
    return True


def is_object(value: object) -> bool:
    """Return whether ``value`` is a dictionary."""
    return isinstance(value, dict)


def is_account(value: object) -> bool:
    """Return whether ``value`` is a time breakdown by rank."""
    return _has_fields(value, _Account) and all(
        len(each) == len(value["ranks"])  # type: ignore[index]
        for each in value["seconds"].values()  # type: ignore[index]
    )


def is_attempt(value: object) -> bool:
    """Return whether ``value`` has the fields of an `Attempt`."""
    return _has_fields(value, Attempt)


def is_call(value: object) -> bool:
    """Return whether ``value`` is the record of a call."""
    if not (isinstance(value, dict) and _has_fields(value, _Call)):
        return False
    accounts = value.get("accounts", {})
    return accounts == {} or is_account(accounts)


def is_settings(value: object) -> bool:
    """Return whether ``value`` holds settings of a run."""
    return _has_fields(value, _Settings)
