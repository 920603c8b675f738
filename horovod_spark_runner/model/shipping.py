"""A model's recipe on its way to Spark's Python workers.

The recipe is small but for the contents of files in it, such as weights, which travel apart from it
in pieces, so that neither a process of Python nor one of Java holds a large model as one object.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..cluster.spark.session import classic_context
from ..serialize import dumps_without, loads_with
from ..storage.checksums import compute_checksum
from ..storage.contents import SMALL_BYTES, Contents, FilePart, Piece
from ..training.engine import engine_named
from ..training.trained_model import Model, Recipe

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

# Bytes of a broadcast: what Spark's processes of Java hold of a model at once.
_PIECE_BYTES = 2 * SMALL_BYTES


class ShippedModel:
    """A recipe as bytes, and its broadcasts in the Spark context that used it last.

    It can be pickled and copied; a copy makes its own broadcasts.

    Attributes:
        digest: identity of the model and its weights; workers keep a loaded model by it.
    """

    def __init__(self, recipe: Recipe) -> None:
        # Only bytes and contents are kept, so that it can be pickled.
        self._recipe, self._contents = dumps_without(recipe, Contents)
        self._sums = [compute_checksum(one) for one in self._contents]
        digested = [self._recipe, *(one.encode() for one in self._sums)]
        self.digest = hashlib.sha256(b"".join(digested)).hexdigest()
        self._broadcast: _Broadcast | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A broadcast belongs to one Spark context.
        return {**self.__dict__, "_broadcast": None}

    def recipe(self) -> Recipe:
        """Return the recipe with all its contents."""
        recipe: Recipe = loads_with(self._recipe, self._contents)
        return recipe

    def loader(self, spark: SparkSession) -> Load:
        """Return a function that unpacks the recipe on a worker of this session."""
        context = classic_context(spark)
        if context is None:
            large = sum(one.size for one in self._contents) > SMALL_BYTES
            pairs = zip(self._contents, self._sums, strict=True)
            sent = [_uploaded(spark, *pair) if large else _Held(pair[0]) for pair in pairs]
            return Load(_Inline(self._recipe), [[one] for one in sent])
        if self._broadcast is None or self._broadcast.context() is not context:
            self._broadcast = _Broadcast(
                weakref.ref(context),
                context.broadcast(self._recipe),
                [_broadcast(context, one) for one in self._contents],
            )
        return Load(self._broadcast.recipe, self._broadcast.contents)


class Value(Protocol):
    """Value sent to a worker: a broadcast, or a substitute for one."""

    @property
    def value(self) -> Any: ...


class Sent(Protocol):
    """A piece of contents on its way."""

    def piece(self) -> Piece:
        """Return it, on a worker."""
        ...


@dataclass(frozen=True)
class Load:
    """Unpacks the recipe on a worker, when it is needed for the first time.

    Attributes:
        recipe: what `dumps_without` pickled.
        contents: what that left out, each in pieces.
    """

    recipe: Value
    contents: Sequence[Sequence[Sent]]

    def __call__(self) -> Recipe:
        contents = [Contents(*(sent.piece() for sent in one)) for one in self.contents]
        recipe: Recipe = loads_with(self.recipe.value, contents)
        return recipe


@dataclass(frozen=True)
class _Broadcast:
    """A recipe on its way to the executors of one Spark context.

    Spark frees it once neither a transformer nor a DataFrame refers to it.
    """

    context: weakref.ReferenceType[Any]
    recipe: Any = field(repr=False)
    contents: Sequence[Sequence[Sent]] = field(repr=False)


@dataclass(frozen=True)
class _SentPiece:
    """A piece as a separate broadcast."""

    sent: Any = field(repr=False)

    def piece(self) -> Piece:
        # Spark keeps what `value` has read; nothing needs it once the model is loaded. What Spark
        # has encrypted is there as a value only.
        path = getattr(self.sent, "_path", None)
        whole: bytes = self.sent.value if path is None else self.sent.load_from_path(path)
        return whole


def _broadcast(context: SparkContext, contents: Contents) -> list[_SentPiece]:
    return [_SentPiece(context.broadcast(bytes(part))) for part in contents.parts(_PIECE_BYTES)]


# What the sessions of Spark Connect have been given as files, which they keep as long as they are.
_files: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_uploading = threading.Lock()


def _uploaded(spark: SparkSession, contents: Contents, digest: str) -> _SentFile:
    """Upload contents to a session of Spark Connect as a file, once.

    Its messages, and the memory of its server, hold no large models.
    """
    name = f"horovod-{digest}"
    with _uploading:
        uploaded = _files.setdefault(spark, set())
        if name not in uploaded:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder, name)
                contents.write_to(place)
                spark.addArtifact(str(place), file=True)
            uploaded.add(name)
    return _SentFile(name, contents.size)


@dataclass(frozen=True)
class _SentFile:
    """A file that Spark Connect puts on every executor.

    Attributes:
        name: what it is called there.
        size: its bytes.
    """

    name: str
    size: int

    def piece(self) -> Piece:
        from pyspark import SparkFiles

        return FilePart(SparkFiles.get(self.name), 0, self.size)


@dataclass(frozen=True)
class _Inline:
    """Stands in for a broadcast on Spark Connect, which has none."""

    value: bytes = field(repr=False)


@dataclass(frozen=True)
class _Held:
    """Stands in for a piece on Spark Connect, within its messages."""

    contents: Contents = field(repr=False)

    def piece(self) -> Piece:
        return self.contents.read()


def load_model(recipe: Recipe) -> Model:
    """Return the function from feature columns to the model's outputs.

    Raises:
        ModelError: what was built is not the model that was trained.
    """
    model = engine_named(recipe.engine).load(recipe)
    return model if recipe.batch_size is None else _in_batches_of(recipe.batch_size, model)


def describe_outputs(recipe: Recipe) -> tuple[list[dict[str, Any]], str]:
    """Return the outputs of the model of ``recipe`` as JSON, or none and the reason.

    Raises:
        ModelError: it is not the model that was trained.
    """
    return engine_named(recipe.engine).describe_outputs(recipe)


def _in_batches_of(size: int, model: Model) -> Model:
    """Call the model with exactly ``size`` rows: the last ones are repeated, and left out again."""

    def prepare(values: dict[str, np.ndarray]) -> list[tuple[Any, int]]:
        rows = len(next(iter(values.values())))
        parts = []
        for begin in range(0, rows, size):
            some = {name: v[begin : begin + size] for name, v in values.items()}
            padding = size - min(size, rows - begin)
            if padding:
                some = {n: np.concatenate([v, v[-1:].repeat(padding, 0)]) for n, v in some.items()}
            parts.append((model.prepare(some), size - padding))
        return parts

    def compute(parts: list[tuple[Any, int]]) -> list[np.ndarray]:
        part_outputs = [[output[:rows] for output in model.compute(some)] for some, rows in parts]
        return [np.concatenate(output) for output in zip(*part_outputs, strict=True)]

    return Model(prepare, compute, slow=model.slow)
