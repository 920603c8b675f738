"""A model's recipe on its way to Spark's Python workers.

The recipe is small but for the contents of files in it, such as weights, which travel apart from it
in pieces, so that neither a process of Python nor one of Java holds a large model as one object.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..cluster.spark.session import classic_context
from ..serialize import dumps_without, loads_with
from ..storage.checksums import compute_checksum
from ..storage.contents import SMALL_BYTES, Contents, FilePart, Piece
from ..training.engine import engine_named
from ..training.trained_model import Model, Recipe

if TYPE_CHECKING:
    from pyspark import Broadcast, SparkContext
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
        self._sent: tuple[weakref.ReferenceType[SparkContext], _Load] | None = None

    def __getstate__(self) -> dict[str, object]:
        # A broadcast belongs to one Spark context.
        return {**self.__dict__, "_sent": None}

    def recipe(self) -> Recipe:
        """Return the recipe with all its contents."""
        recipe: Recipe = loads_with(self._recipe, self._contents)
        return recipe

    def loader(self, spark: SparkSession) -> _Load:
        """Return a function that unpacks the recipe on a worker of this session."""
        context = classic_context(spark)
        if context is None:
            large = sum(one.size for one in self._contents) > SMALL_BYTES
            pairs = zip(self._contents, self._sums, strict=True)
            sent = [_upload(spark, *pair) if large else pair[0].read for pair in pairs]
            return _Load(Contents(self._recipe).read, [[one] for one in sent])
        if self._sent is None or self._sent[0]() is not context:
            load = _Load(
                _broadcast(context, self._recipe),
                [
                    [_broadcast(context, bytes(part)) for part in one.parts(_PIECE_BYTES)]
                    for one in self._contents
                ],
            )
            self._sent = weakref.ref(context), load
        return self._sent[1]


@dataclass(frozen=True)
class _Load:
    """Unpacks the recipe on a worker, when it is needed for the first time.

    Attributes:
        recipe: gives what `dumps_without` pickled.
        contents: gives what that left out, each in pieces.
    """

    recipe: Callable[[], bytes] = field(repr=False)
    contents: Sequence[Sequence[Callable[[], Piece]]] = field(repr=False)

    def __call__(self) -> Recipe:
        contents = [Contents(*(piece() for piece in one)) for one in self.contents]
        recipe: Recipe = loads_with(self.recipe(), contents)
        return recipe


def _broadcast(context: SparkContext, part: bytes) -> Callable[[], bytes]:
    """Broadcast a part; Spark frees it once no transformer or DataFrame refers to it."""
    return functools.partial(_read_broadcast, context.broadcast(part))


def _read_broadcast(sent: Broadcast[bytes]) -> bytes:
    # Spark keeps what `value` has read; nothing needs it once the model is loaded. What Spark has
    # encrypted is there as a value only.
    path = getattr(sent, "_path", None)
    whole: bytes = sent.value if path is None else sent.load_from_path(path)
    return whole


# What the sessions of Spark Connect have been given as files, which they keep as long as they are.
_files: weakref.WeakKeyDictionary[SparkSession, set[str]] = weakref.WeakKeyDictionary()
_uploading = threading.Lock()


def _upload(spark: SparkSession, contents: Contents, digest: str) -> Callable[[], FilePart]:
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
    return functools.partial(_find_file, name, contents.size)


def _find_file(name: str, size: int) -> FilePart:
    """Return a file that Spark Connect has put on this executor."""
    from pyspark import SparkFiles

    return FilePart(SparkFiles.get(name), 0, size)


def load_model(recipe: Recipe) -> Model:
    """Return the function from feature columns to the model's outputs.

    Raises:
        ModelError: what was built is not the model that was trained.
    """
    model = engine_named(recipe.engine).load(recipe)
    return model if recipe.batch_size is None else _in_batches_of(recipe.batch_size, model)


def _in_batches_of(size: int, model: Model) -> Model:
    """Call the model with exactly ``size`` rows: the last ones are repeated, and left out again."""

    def prepare(values: dict[str, np.ndarray]) -> list[tuple[object, int]]:
        rows = len(next(iter(values.values())))
        parts = []
        for begin in range(0, rows, size):
            some = {name: v[begin : begin + size] for name, v in values.items()}
            padding = size - min(size, rows - begin)
            if padding:
                some = {n: np.concatenate([v, v[-1:].repeat(padding, 0)]) for n, v in some.items()}
            parts.append((model.prepare(some), size - padding))
        return parts

    def compute(parts: list[tuple[object, int]]) -> list[np.ndarray]:
        part_outputs = [[output[:rows] for output in model.compute(some)] for some, rows in parts]
        return [np.concatenate(output) for output in zip(*part_outputs, strict=True)]

    return Model(prepare, compute, slow=model.slow)
