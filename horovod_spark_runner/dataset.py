"""Data for functions run by `HorovodRunner`: prepared on the driver, read by every rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .cluster.spark.session import check_running, runs_on_this_machine
from .config.data import WINDOW_BYTES, DataOptions, Materializer, Transform
from .config.keywords import check_keywords, usage_of
from .config.validators import check_count, check_flag
from .data.manifest import Manifest
from .data.prepare.datasets import check_data, data_folder, prepare_one, session_of
from .data.prepare.schema import Roles
from .data.read.reader import DatasetReader
from .data.read.sharding import EpochPlan, epoch_steps, plan_epoch
from .data.store import delete_dataset
from .errors import InvalidInputError, brief
from .storage.arrays import Arrays
from .storage.filesystem import Location

if TYPE_CHECKING:
    import tensorflow as tf
    from pyspark.sql import DataFrame

    from .engines.torch.dataset import TorchDataset

# Folder of rows on a ``local`` master without a cache directory.
_DEFAULT_FOLDER = "runs/data"


@dataclass(frozen=True)
class Dataset:
    """Rows that any number of ranks can read, each its own shard; made by `prepare_dataset`.

    It can be pickled: pass it to ``HorovodRunner.run`` as an argument.

    Attributes:
        manifest: files, types and shapes of the rows.
        transforms: functions of each row's value, by column.
    """

    manifest: Manifest
    transforms: Mapping[str, Transform] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of the whole dataset."""
        return self.manifest.rows

    def steps(self, batch_size: int, size: int) -> int:
        """Return the steps of an epoch.

        Args:
            batch_size: rows of each rank in a step.
            size: the number of ranks.

        Raises:
            InvalidInputError: a number is not at least 1.
        """
        global_batch = check_count("batch_size", batch_size) * check_count("size", size)
        return epoch_steps(self.rows, global_batch)

    def epoch(
        self,
        epoch: int,
        *,
        rank: int,
        size: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        first_step: int = 0,
        window_bytes: int = WINDOW_BYTES,
        as_tensors: bool = False,
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the batches of one rank in one epoch, read ahead by a thread.

        Over all ranks, every row comes exactly once. All ranks take the same number of steps; in
        the last, a rank may have fewer rows than ``batch_size``, or none. The order depends on
        seed, epoch and ``batch_size * size`` only. Close the generator (``contextlib.closing``) if
        you leave it before its end.

        Args:
            epoch: epoch, from 0; each has another order.
            rank: this rank, such as ``hvd.rank()``.
            size: number of ranks, such as ``hvd.size()``.
            batch_size: rows per rank and step.
            seed: seed of the order.
            shuffle: ``False`` keeps the order of the rows in storage.
            first_step: first step, for a resumed epoch; earlier rows are not read.
            window_bytes: memory of the shuffle window, in bytes.
            as_tensors: TensorFlow tensors, without a copy, in place of NumPy arrays.

        Yields:
            By column, an array of shape ``(rows, *shape)``; of strings, an array of objects.

        Raises:
            InvalidInputError: ``rank`` is not below ``size``, or a number is out of range.
        """
        share = _Share.of(rank, size, batch_size)
        order = _Order.of(seed, shuffle, window_bytes)
        first_step = check_count("first_step", first_step, minimum=0)
        plan = self._plan(check_count("epoch", epoch, minimum=0), share, order)
        return self._read(plan, share, first_step, as_tensors)

    def tf_dataset(
        self,
        features: str | Sequence[str],
        labels: str | Sequence[str],
        weight: str | None = None,
        *,
        rank: int,
        size: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        first_epoch: int = 0,
        window_bytes: int = WINDOW_BYTES,
    ) -> tf.data.Dataset:
        """Return the batches of one rank as an endless ``tf.data.Dataset``, for ``model.fit``.

        All batches are full: a partial global batch at the end of an epoch is dropped, with other
        rows in each epoch. So an epoch has ``rows // (batch_size * size)`` steps: pass them to
        ``model.fit`` as ``steps_per_epoch``.

        Args:
            features: the model's input column, or several, which come as a dict.
            labels: the label column, or several, which come as a dict.
            weight: column of sample weights.
            rank: this rank, such as ``hvd.rank()``.
            size: number of ranks, such as ``hvd.size()``.
            batch_size: rows per rank and step.
            seed: seed of the order.
            shuffle: ``False`` keeps the order of the rows in storage.
            first_epoch: epoch to begin with.
            window_bytes: memory of the shuffle window, in bytes; rows that take no more than this
                in all are read from storage only once.

        Raises:
            InvalidInputError: ``rank`` is not below ``size``, a number is out of range, there are
                fewer rows than one global batch, or no such column.
        """
        from .engines.keras.binding import blocks_to_dataset

        share = _Share.of(rank, size, batch_size)
        order = _Order.of(seed, shuffle, window_bytes)
        self._count_steps(share.batch_size, True, share.size)
        roles: list[Any] = [features, labels] + ([] if weight is None else [weight])
        names = [
            *_column_names("features", features),
            *_column_names("labels", labels),
            *([] if weight is None else _column_names("weight", [weight])),
        ]
        available = [column.name for column in self.manifest.columns]
        if unknown := sorted(set(names) - set(available)):
            raise InvalidInputError(f"no column {unknown[0]!r}; there are {available}")
        first = check_count("first_epoch", first_epoch, minimum=0)
        blocks = functools.partial(self._full_blocks, names, share, order, first)
        columns = {name: self.manifest.column(name) for name in names}
        return blocks_to_dataset(blocks, columns, tuple(roles), share.batch_size)

    def torch_dataset(
        self,
        *,
        batch_size: int,
        rank: int | None = None,
        size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        window_bytes: int = WINDOW_BYTES,
    ) -> TorchDataset:
        """Return the batches of one rank as a ``torch.utils.data.IterableDataset``.

        An element is a batch: a dictionary of tensors by column, of text as lists. Rows come in
        the order of `epoch`. Iterate over it, or give it to ``DataLoader(…, batch_size=None)``:
        each of its worker processes reads all rows of the rank, and decodes and transforms its
        own. Each iteration is one epoch: the first is epoch 0, or that of ``set_epoch(epoch)``.
        ``len()`` is the number of steps, equal on all ranks. ``state_dict()`` is a position within
        an epoch, and the iteration after ``load_state_dict(state)`` begins there.

        Args:
            batch_size: rows per rank and step.
            rank: this rank; by default that of ``torch.distributed``, or the variable ``RANK``.
            size: number of ranks; by default as for ``rank``, or ``WORLD_SIZE``.
            seed: seed of the order.
            shuffle: ``False`` keeps the order of the rows in storage.
            drop_last: drop a partial global batch at the end of an epoch, with other rows in each
                epoch. With ``False`` its rows are spread over the ranks, of which some may have
                one fewer, or none.
            window_bytes: memory of the shuffle window, in bytes.

        Raises:
            InvalidInputError: ``rank`` is not below ``size``, only one of them is given, or a
                number is out of range; when read, there are fewer rows than one global batch.
        """
        from .engines.torch.dataset import TorchDataset

        order = _Order.of(seed, shuffle, window_bytes)
        shard = None
        if rank is not None or size is not None:
            if rank is None or size is None:
                raise InvalidInputError(f"give rank and size together, got {rank} and {size}")
            share = _Share.of(rank, size, batch_size)
            shard = share.rank, share.size
        count = check_count("batch_size", batch_size)
        read = functools.partial(self._read_every, count, order)
        steps = functools.partial(self._count_steps, count, check_flag("drop_last", drop_last))
        return TorchDataset(read, steps, shard)

    def share(self, *, rank: int, size: int, batch_size: int) -> Generator[Arrays, None, None]:
        """Yield one rank's share of all rows in the order of storage, for evaluation.

        Ranks may get different numbers of batches. Transforms get no random generator.

        Args:
            rank: the rank, from 0.
            size: the number of ranks.
            batch_size: rows of a batch; the last one of a Parquet row group may have fewer, so
                weight results of a batch by its rows.

        Raises:
            InvalidInputError: ``rank`` is not below ``size``, or a number is out of range.
        """
        return self._read_share(_Share.of(rank, size, batch_size))

    def delete(self) -> None:
        """Delete the rows from storage, unless they are the caller's own Parquet files."""
        delete_dataset(self.manifest)

    def _count_steps(self, batch_size: int, drop_last: bool, size: int) -> int:
        if not drop_last:
            return self.steps(batch_size, size)
        if self.rows < batch_size * size:
            raise InvalidInputError(
                f"a global batch of {batch_size} x {size} rows is more than the {self.rows} rows; "
                "lower batch_size"
            )
        return self.rows // (batch_size * size)

    def _read_every(
        self,
        batch_size: int,
        order: _Order,
        epoch: int,
        rank: int,
        size: int,
        first_step: int,
        every: int,
    ) -> Generator[Arrays, None, None]:
        share = _Share.of(rank, size, batch_size)
        return self._read(self._plan(epoch, share, order), share, first_step, False, every)

    def _plan(self, epoch: int, share: _Share, order: _Order) -> EpochPlan:
        return plan_epoch(
            [(group.rows, group.size) for group in self.manifest.row_groups],
            global_batch=share.global_batch,
            seed=order.seed,
            epoch=epoch,
            window_bytes=order.window_bytes,
            shuffle=order.shuffle,
        )

    def _read_share(self, share: _Share) -> Generator[Arrays, None, None]:
        with (
            self._reader() as reader,
            contextlib.closing(reader.share(share.rank, share.size, share.batch_size)) as batches,
        ):
            for batch in batches:
                yield batch.arrays

    def _read(
        self, plan: EpochPlan, share: _Share, first_step: int, as_tensors: bool, every: int = 1
    ) -> Generator[dict[str, Any], None, None]:
        convert: Callable[[Arrays], dict[str, object]] = dict
        if as_tensors:
            from .engines.keras.binding import as_tensors as convert
        with (
            self._reader() as reader,
            contextlib.closing(
                reader.epoch(plan, share.rank, share.size, first_step, every)
            ) as batches,
        ):
            for batch in batches:
                yield convert(batch.arrays)

    def _reader(
        self, columns: Sequence[str] | None = None, keep_bytes: int = 0
    ) -> contextlib.closing[DatasetReader]:
        reader = DatasetReader(self.manifest, columns, self.transforms, keep_bytes)
        return contextlib.closing(reader)

    def _full_blocks(
        self, columns: Sequence[str], share: _Share, order: _Order, first_epoch: int
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield arrays of shape ``(batches, batch_size, *shape)``, by column."""
        with self._reader(columns, keep_bytes=order.window_bytes) as reader:
            for epoch in itertools.count(first_epoch):
                plan = self._plan(epoch, share, order)
                full = plan.rows // plan.global_batch
                with contextlib.closing(reader.chunks(plan, share.rank, share.size)) as chunks:
                    for chunk in chunks:
                        if chunk.steps.start < full:
                            steps = len(chunk.counts)
                            yield {
                                name: values.reshape(steps, -1, *values.shape[1:])
                                for name, values in chunk.arrays.items()
                            }


def _column_names(argument: str, value: Any) -> list[str]:
    """Return the columns an argument of `Dataset.tf_dataset` names."""
    names = [value] if isinstance(value, str) else value
    listed = isinstance(names, Sequence) and len(names) > 0
    if not listed or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(
            f"{argument} must be a column name, or a list of some, got {brief(value)}; for the "
            "arrays of chosen columns alone, see Dataset.epoch"
        )
    return list(names)


@dataclass(frozen=True)
class _Share:
    """One rank's shard of every global batch; plain, checked numbers."""

    rank: int
    size: int
    batch_size: int

    @classmethod
    def of(cls, rank: int, size: int, batch_size: int) -> _Share:
        batch_size = check_count("batch_size", batch_size)
        size = check_count("size", size)
        rank = check_count("rank", rank, minimum=0)
        if rank >= size:
            raise InvalidInputError(f"rank must be below size={size}, got {rank}")
        return cls(rank, size, batch_size)

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.size


@dataclass(frozen=True)
class _Order:
    """Inputs of the order of rows, besides the epoch; plain, checked numbers."""

    seed: int
    shuffle: bool
    window_bytes: int

    @classmethod
    def of(cls, seed: int, shuffle: bool, window_bytes: int) -> _Order:
        seed = check_count("seed", seed, minimum=0)
        return cls(seed, check_flag("shuffle", shuffle), check_count("window_bytes", window_bytes))


def _usage_of_epoch() -> dict[str, str]:
    return {name: f"{how} in Dataset.epoch(…)" for name, how in usage_of(Dataset.epoch).items()}


@check_keywords("prepare_dataset", _usage_of_epoch)
def prepare_dataset(
    df: DataFrame | str | Path,
    columns: Sequence[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    shapes: Mapping[str, Sequence[int] | int] | None = None,
    dtypes: Mapping[str, str] | None = None,
    transforms: Mapping[str, Transform] | None = None,
    allow_nan: bool = False,
    materializer: Materializer = "petastorm",
) -> Dataset:
    """Make a DataFrame readable by the ranks of a `HorovodRunner`.

    Args:
        df: the rows, or the path or URL of Parquet files (a folder, or one file).
        columns: the columns to read: of numbers, arrays, vectors, bytes or strings.
        data_dir: cache directory that the driver and all executors reach; by default Spark's
            setting ``spark.horovod.dataDir``, else, on a ``local`` master, ``runs/data``. Existing
            rows of the same data are reused.
        shapes: see `DataOptions`.
        dtypes: see `DataOptions`.
        transforms: see `DataOptions`.
        allow_nan: see `DataOptions`.
        materializer: see `DataOptions`.

    Raises:
        DataError: the columns or values cannot be read as arrays.
        InvalidInputError: ``data_dir`` is missing on a cluster, or cannot be written to.
    """
    options = DataOptions(
        shapes=shapes or {},
        dtypes=dtypes or {},
        transforms=transforms or {},
        allow_nan=allow_nan,
        materializer=materializer,
        data_dir=data_dir,
    )
    listed = isinstance(columns, Sequence) and not isinstance(columns, str)
    if not listed or not all(isinstance(name, str) for name in columns):
        raise InvalidInputError(f"columns must be a list of column names, got {brief(columns)}")
    spark = check_running(session_of(df))
    roles = Roles(tuple(columns), (), labelled=False)
    check_data(df, roles, options)
    folder = data_folder(options, Location(_DEFAULT_FOLDER), spark)
    if folder.is_local and not options.data_dir and not runs_on_this_machine(spark):
        raise InvalidInputError(
            "data_dir is needed on a cluster: a folder or URL that the driver and all executors "
            "can write to"
        )
    return Dataset(prepare_one(df, roles, options, folder), dict(options.transforms))
