"""A model's recipe on its way to Spark's Python workers."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

from ..serialize import dumps
from ..spark.session import classic_context
from ..training.trained_model import Recipe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ShippedModel:
    """A recipe as bytes, and its broadcast in the Spark context that used it last.

    It can be pickled and copied; a copy makes its own broadcast.

    Attributes:
        digest: identity of the model and its weights; workers keep a loaded model by it.
    """

    def __init__(self, recipe: Recipe) -> None:
        # Only bytes are kept, so that it can be pickled.
        self._payload = dumps(recipe)
        self.digest = hashlib.sha256(self._payload).hexdigest()
        self._broadcast: _Broadcast | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A broadcast belongs to one Spark context.
        return {**self.__dict__, "_broadcast": None}

    def recipe(self) -> Recipe:
        """Return the recipe with all its contents."""
        recipe: Recipe = cloudpickle.loads(self._payload)
        return recipe

    def loader(self, spark: SparkSession) -> Load:
        """Return what unpacks the recipe on a worker of this session."""
        context = classic_context(spark)
        if context is None:
            return Load(_Inline(self._payload))
        if self._broadcast is None or self._broadcast.context() is not context:
            self._broadcast = _Broadcast(weakref.ref(context), context.broadcast(self._payload))
        return Load(self._broadcast.value)


@dataclass(frozen=True)
class Load:
    """Unpacks the recipe on a worker, when it is needed for the first time."""

    payload: Any

    def __call__(self) -> Recipe:
        recipe: Recipe = cloudpickle.loads(self.payload.value)
        return recipe


@dataclass(frozen=True)
class _Broadcast:
    """A payload on its way to the executors of one Spark context.

    Spark frees it once neither a transformer nor a DataFrame refers to it.
    """

    context: weakref.ReferenceType[Any]
    value: Any = field(repr=False)


@dataclass(frozen=True)
class _Inline:
    """Stands in for a broadcast on Spark Connect, which has none."""

    value: bytes = field(repr=False)
