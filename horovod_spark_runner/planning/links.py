"""Alpha-beta model of links: messages, ring and tree collectives. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInputError, brief
from ..formatting import number

# Part of a link's speed that Ethernet, IP and TCP leave for data.
PAYLOAD = 0.94
# Seconds of a small message between two hosts over TCP, assumed where only a speed is given.
ETHERNET_LATENCY = 50e-6
# Largest part of a sum that can be latency, so that some is left for the bytes.
_OF_A_SUM = 0.9
_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*(mbit|gbit)(?:/s)?", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """Link between two ranks: a message of n bytes takes ``latency + n / bandwidth`` seconds.

    Attributes:
        latency: seconds of an empty message (alpha).
        bandwidth: bytes per second (the inverse of beta).

    Raises:
        InvalidInputError: a number cannot be right.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name, least in (("latency", 0.0), ("bandwidth", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidInputError(f"{name} of a Link must be a number, got {brief(value)}")
            if not least <= value < math.inf:
                raise InvalidInputError(
                    f"{name} of a Link must be finite and at least {least:g}, got {brief(value)}"
                )


def format_link(link: Link) -> str:
    """Format a link."""
    return f"{link.latency * 1e6:.3g} µs, {number(link.bandwidth * 8 / 1e9, 3)} Gbit/s"


def slow_link(link: Link, factor: float) -> Link:
    """Return a link that is slower by a factor, in latency and in bandwidth."""
    return Link(link.latency * factor, link.bandwidth / factor)


def slower_link(link: Link, other: Link) -> Link:
    """Return a link with the higher latency and the lower bandwidth of two."""
    return Link(max(link.latency, other.latency), min(link.bandwidth, other.bandwidth))


def parse_link(given: object) -> Link:
    """Return the link for a `Link` or a named speed, such as ``"10gbit"``.

    Of a named speed, 94 % are for data, and the latency is 50 microseconds.

    Raises:
        InvalidInputError: it is neither.
    """
    if isinstance(given, Link):
        return given
    found = _SPEED.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None or not float(found[1]):
        raise InvalidInputError(
            'a network is a speed such as "100mbit" or "10gbit", or a Link(latency=…, '
            f"bandwidth=…) in seconds and bytes per second; got {brief(given)}"
        )
    bits = float(found[1]) * (1e9 if found[2].lower() == "gbit" else 1e6)
    return Link(ETHERNET_LATENCY, bits / 8 * PAYLOAD)


def ring_seconds(ranks: int, size: float, link: Link) -> float:
    """Return the seconds of a sum over all ranks by a ring.

    Each rank sends ``2 · (ranks - 1)`` messages of ``size / ranks`` bytes, one after the other.

    Args:
        ranks: how many there are.
        size: bytes that each rank has.
        link: the slowest link of the ring.
    """
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def tree_seconds(ranks: int, link: Link) -> float:
    """Return the seconds in which all ranks agree on a few bytes: up a tree of them and down."""
    return 2 * math.ceil(math.log2(ranks)) * link.latency if ranks > 1 else 0.0


def doubling_rounds(ranks: int) -> int:
    """Return the messages, one after the other, in which MPI adds up one number of each rank.

    Open MPI sums what is too small for a ring by recursive doubling. Where the ranks are no power
    of two, those beyond one hand their number over first, and get the sum last.
    """
    whole = ranks.bit_length() - 1
    return whole if ranks == 1 << whole else whole + 2


def fit_link(seconds: Mapping[int, float], ranks: int, latency: float) -> Link:
    """Return the link of that latency on which `ring_seconds` comes nearest to what was measured.

    Small and large messages count alike: errors are weighed by what the message has taken.

    Args:
        seconds: what sums took, by bytes; of such as go around a ring.
        ranks: how many took part, 2 at least.
        latency: seconds of an empty message. Nine tenths of the shortest sum at most count for it:
            where ranks share cores, a single small message may take longer than one of many.
    """
    size, took = np.array(sorted(seconds.items()), np.float64).T
    rounds = 2 * (ranks - 1)
    latency = min(latency, _OF_A_SUM * float(took.min()) / rounds)
    column = rounds * size / ranks / took
    per_byte = float(column @ (1 - rounds * latency / took) / (column @ column))
    return Link(latency, 1.0 / per_byte)
