"""Which captured object holds what: nothing may be held by two."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from .parts import layers_of


class Holders:
    """Which object holds each layer and optimizer of those that are pickled.

    Each model, layer or optimizer is pickled by itself, so what two of them hold, or one holds that
    is pickled beside it, would come out as two.
    """

    def __init__(self) -> None:
        self._of: dict[int, Any] = {}

    def note(self, value: Any) -> None:
        """Take note of a Keras object.

        Raises:
            pickle.PicklingError: what it holds is, or is held by, another one.
        """
        for part in _kept_by(value):
            holder = self._of.setdefault(id(part), value)
            if holder is not value:
                ways = " and ".join(_way(part, one) for one in (holder, value))
                raise pickle.PicklingError(
                    f"{_called(part)} is captured twice, {ways}, and would come out as two; "
                    "capture one model that holds all, and take the others from it where they are "
                    "used"
                )


def _kept_by(value: Any) -> Iterator[Any]:
    """Yield an object, and the layers with variables and the optimizer that it holds."""
    yield value
    for part in layers_of(value)[1:]:
        if part.variables:
            yield part
    # Of mixed precision, one in another.
    for name in ("optimizer", "inner_optimizer"):
        value = getattr(value, name, None)
        if not hasattr(value, "apply_gradients"):
            return
        yield value


def _way(part: Any, holder: Any) -> str:
    return "by itself" if part is holder else f"in {_called(holder)}"


def _called(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, 'name', '')!r}"
