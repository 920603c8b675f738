"""Buckets of gradients, so that the first is sent while others are still computed."""

from __future__ import annotations

from collections.abc import Sequence

# Enough to be worth a message of their own, few enough to leave early (benchmarks/overlap.py).
BUCKET_BYTES = 2 << 20


def in_buckets(sizes: Sequence[int], least: int) -> list[list[int]]:
    """Return the numbers of tensors in parts, in the order in which they come to be, about. Pure.

    The backward pass begins with what the forward pass has used last.

    Args:
        sizes: bytes of each tensor, in the order in which the forward pass uses them.
        least: a part ends with the tensor that makes it so many bytes.

    Returns:
        The parts, the one that leaves first at the beginning; in each, numbers go down.
    """
    buckets: list[list[int]] = []
    size = least
    for number in reversed(range(len(sizes))):
        if size >= least:
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += sizes[number]
    return buckets
