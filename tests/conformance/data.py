"""The cases' data: one small table of many kinds of columns, in Parquet, without Spark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.parquet import open_parquet
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch
from horovod_spark_runner.storage.filesystem import Location

from .case import Case, columns_in

GLOBAL_BATCH = 16
VALIDATION_ROWS = 21
SEED = 0
WINDOW = 256 * 1024 * 1024
SHAPES = {"image": (8, 8, 1), "photo": (32, 32, 3), "series": (5, 3), "clip": (3, 8, 8)}
WORDS = np.array(["red", "green", "blue", "black"])


def make_columns(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return the columns of a table. Pure."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 4))
    scores = x @ np.array([[1, -1, 0], [0, 1, -1], [2, 0, 1], [-1, 1, 1]])
    label = scores.argmax(1)
    ends = random.integers(2, 7, size=(rows, 1))
    tokens = np.where(np.arange(6) < ends, random.integers(1, 10, size=(rows, 6)), 0)
    simplex = np.exp(scores / 4)
    y = x @ [0.5, -1.0, 0.25, 0.1] + 0.1 * random.normal(size=rows)
    real = {
        "x": x,
        "a": x[:, :2],
        "b": x[:, 1:],
        "s": x[:, 0],
        "image": random.uniform(size=(rows, 64)) + (label / 3)[:, None],
        "photo": random.uniform(size=(rows, 3072)),
        "series": random.normal(size=(rows, 15)),
        "clip": random.uniform(size=(rows, 192)),
        "y": y,
        "y2": np.stack([y, -y], 1),
        "z": 0.5 * y + 1,
        "positive": np.exp(0.3 * y),
        "sign": np.sign(y),
        "signs": 2.0 * np.eye(3)[label] - 1,
        "onehot": np.eye(3)[label],
        "simplex": simplex / simplex.sum(1, keepdims=True),
        "many": np.stack([y > 0, x[:, 1] > 0, x[:, 2] > 0], 1).astype(float),
        "unit": 1 / (1 + np.exp(-y)),
        "w": random.uniform(0.5, 1.5, size=rows),
        "seldom": random.uniform(size=rows) * (random.uniform(size=rows) > 0.7),
        "nothing": np.zeros(rows),
    }
    whole = {
        "label": label,
        "binary": (y > 0).astype(int),
        "tokens": tokens,
        "steps": random.integers(0, 3, size=(rows, 5)),
        "code": random.integers(10, 14, size=rows),
        "codes": random.integers(1, 4, size=(rows, 2)),
    }
    real["each"] = np.random.default_rng(seed + 1).uniform(0, 2, (rows, 5))
    whole["void"] = np.where(x[:, :1] > -0.5, 2, whole["steps"])  # a class alone, in most rows
    return {
        **{name: values.astype(np.float32) for name, values in real.items()},
        **{name: values.astype(np.int32) for name, values in whole.items()},
    }


def write_data(folder: Path) -> None:
    """Write the tables that cases ask for, each in a folder called by its rows."""
    for rows, groups in ((59, 3), (49, 1), (48, 2), (VALIDATION_ROWS, 1)):
        columns = make_columns(rows, seed=rows)
        table = pa.table({name: _arrow(values) for name, values in columns.items()})
        words = WORDS[columns["label"]]
        table = table.append_column("word", pa.array(words))
        sentences = [" ".join(WORDS[row[row > 0] % 4]) for row in columns["tokens"]]
        table = table.append_column("sentence", pa.array(sentences))
        place = folder / str(rows)
        place.mkdir(parents=True)
        pq.write_table(table, place / "part-0.parquet", row_group_size=-(-rows // groups))


def _arrow(values: np.ndarray) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(values.reshape(-1))
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def open_data(folder: Path, rows: int, case: Case) -> Manifest:
    """Return the table of so many rows, with the columns of ``case``."""
    features, labels = (tuple(dict.fromkeys(columns_in(part))) for part in (case.x, case.y))
    labels = tuple(name for name in labels if name not in features)
    roles = Roles(features, labels, case.weight)
    shapes = {name: SHAPES[name] for name in roles.columns if name in SHAPES}
    manifest = open_parquet(Location(folder / str(rows)), DataRequest(roles, shapes))
    if manifest is None:
        raise ValueError(f"the columns {roles.columns} cannot be read without Spark")
    return manifest


def train_batches(manifest: Manifest, epochs: int) -> list[list[dict[str, Any]]]:
    """Return the batches of each epoch as one rank reads them."""
    reader = DatasetReader(manifest)
    groups = [(group.rows, group.size) for group in manifest.row_groups]
    read = []
    for epoch in range(epochs):
        plan = plan_epoch(
            groups, global_batch=GLOBAL_BATCH, seed=SEED, epoch=epoch, window_bytes=WINDOW
        )
        read.append([_copied(batch.arrays) for batch in reader.epoch(plan, 0, 1)])
    reader.close()
    return read


def validation_batches(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the batches of an evaluation as one rank reads them."""
    reader = DatasetReader(manifest)
    batches = [_copied(batch.arrays) for batch in reader.share(0, 1, GLOBAL_BATCH)]
    reader.close()
    return batches


def _copied(arrays: Any) -> dict[str, Any]:
    return {name: np.array(values) for name, values in arrays.items()}


def join(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all rows of the batches, by column."""
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def write_once(folder: Path) -> Path:
    """Write the tables below ``folder`` if they are not there; return where they are."""
    place = folder / "data"
    if not place.exists():
        making = folder / f"data-{os.getpid()}"
        write_data(making)
        making.rename(place)
    return place
