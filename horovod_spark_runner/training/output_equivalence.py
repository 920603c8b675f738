"""Check that a rebuilt model gives the same outputs as the trained one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ModelError

# How far other hardware may be off, relative to the largest value.
_ELSEWHERE = 0.02


def check_close(value: np.ndarray, other: np.ndarray) -> None:
    """Check that two outputs of one model on one machine are equal, but for rounding.

    Raises:
        AssertionError: they are not.
    """
    if value.dtype.kind in "iubOS":
        np.testing.assert_array_equal(value, other, "its outputs differ")
    else:
        exact = value.dtype in (np.float32, np.float64)
        tolerance = 1e-4 if exact else 2e-2
        value, other = value.astype(np.float64), other.astype(np.float64)
        np.testing.assert_allclose(
            other, value, rtol=tolerance, atol=tolerance, err_msg="its outputs differ"
        )


def check_like(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> None:
    """Check that a model that was built anew gives what the trained one gave, perhaps elsewhere.

    Args:
        expected: the outputs of the trained model.
        found: those of this one, for the same inputs.

    Raises:
        ModelError: it gives something else.
    """
    for number, (value, other) in enumerate(zip(expected, found, strict=False)):
        if value.shape != other.shape or not _is_near(value, other):
            raise ModelError(
                "model_fn builds another model than was trained, although its weights fit: for "
                f"the same inputs output {number} is {_some(other)}, that of the trained one was "
                f"{_some(value)}"
            )


def _is_near(value: np.ndarray, other: np.ndarray) -> bool:
    if value.dtype.kind not in "iubO":
        value, other = value.astype(np.float64), other.astype(np.float64)
        finite = np.abs(value[np.isfinite(value)])
        limit = _ELSEWHERE * max(1e-3, finite.max(initial=0.0))
        return bool(np.allclose(other, value, rtol=_ELSEWHERE, atol=limit, equal_nan=True))
    # A class whose neighbour is about as likely may be another one elsewhere.
    return bool(np.mean(value == other) >= 0.5)


def _some(array: np.ndarray) -> str:
    return np.array2string(array.reshape(-1)[:3], precision=4, separator=", ")
