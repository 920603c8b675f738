"""Whether what a module predicts for a row follows from that row alone.

A program that was captured in training mode drops and normalises as it did there, whatever mode it
is put into; a module may look at the rows of a batch together in evaluation mode, too. Spark cuts
rows into batches as it likes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from ...storage.arrays import Arrays
from ..likeness import check_close
from .loading import Predicting, to_numpy
from .outputs import leaves

BY_CHANCE = "gives other outputs whenever it is called with the same rows"
BY_OTHERS = "gives other outputs for a row where the rows beside it are others"


def unsteady(called: Predicting, arrays: Mapping[str, np.ndarray], calls: int = 2) -> str:
    """Return what the outputs of a module depend on besides the row that they are of.

    Args:
        called: the module; generators of random numbers stay as they are.
        arrays: some rows, which it can be called with.
        calls: how often it is called with them: few numbers may all be dropped twice.

    Returns:
        `BY_CHANCE`, `BY_OTHERS`, or ``""``; also where it cannot be called with other such rows.
    """
    beside = {name: array[[0] * len(array)] for name, array in arrays.items()}
    with _generator_kept():
        once = _given(called, arrays)
        if not all(_same(once, _given(called, arrays)) for _ in range(calls - 1)):
            return BY_CHANCE
        try:
            other = _given(called, beside)
        except Exception:  # the user's own forward may fail in any way
            return ""
    return "" if _same([one[:1] for one in once], [one[:1] for one in other]) else BY_OTHERS


def various(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Return rows whose whole numbers differ as well, 0 and 1 by turns."""
    found = dict(arrays)
    for name, array in arrays.items():
        if array.dtype.kind in "iub":
            turns = np.arange(len(array)).reshape(-1, *[1] * (array.ndim - 1)) % 2
            found[name] = np.broadcast_to(turns, array.shape).astype(array.dtype)
    return found


@contextlib.contextmanager
def _generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _given(called: Predicting, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [to_numpy(tensor) for _, tensor in leaves(called.of(arrays))]


def _same(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    try:
        for one, other in zip(some, others, strict=True):
            check_close(one, other)
    except AssertionError:
        return False
    return True
