"""Reading what is hard to read: wide rows, images, many small files, a distant object store.

One process reads one shuffled epoch of each, our reader against the others in turns:

* rows of 4,096 numbers, and 10,000 files of 20 rows: raw pyarrow, row group by row group, and
  Petastorm's ``make_batch_reader`` and ``make_tf_dataset``, the best of 1, 2 and 4 workers;
* JPEG images of 128 x 128 in a column of bytes: tf.data's own ``decode_jpeg`` on all cores, its
  bytes in memory already;
* row groups in an object store whose answers take 30 ms: pyarrow through the same file system, one
  row group after the other, and pyarrow's dataset scanner, which reads ahead on threads.

Usage: python benchmarks/reading.py [--repeats 3] [--write]
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
from peers import petastorm_environment as petastorm
from peers.object_store import object_store
from report import present, table

BATCH = 256
WIDE = 4096
NARROW = 64
LATENCY = 0.03
SIDE = 128

Contenders = dict[str, Callable[[int], Any]]


def write_files(folder: Path, files: int, rows: int, width: int) -> None:
    """Write Parquet files of so many rows each: ``features`` and ``label``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    # Row groups of 2 MB, as a materialized dataset has.
    group = max(1, 2 * 2**20 // (4 * width))
    for number in range(files):
        values = pa.array(generator.random(rows * width, np.float32))
        offsets = pa.array(np.arange(0, rows * width + 1, width, np.int32))
        columns = {
            "features": pa.ListArray.from_arrays(offsets, values),
            "label": np.arange(rows, dtype=np.int32) % 10,
        }
        place = folder / f"part-{number:05d}.parquet"
        pq.write_table(pa.table(columns), place, row_group_size=group, use_dictionary=False)


def write_images(folder: Path, images: int) -> list[bytes]:
    """Write JPEG images of noise in 8 x 8 blocks into one file; return them."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    generator = np.random.default_rng(0)
    encoded = []
    for _ in range(images):
        blocks = generator.integers(0, 256, (SIDE // 8, SIDE // 8, 3), np.uint8)
        stream = io.BytesIO()
        Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(stream, "JPEG", quality=90)
        encoded.append(stream.getvalue())
    folder.mkdir(parents=True)
    columns = {"image": pa.array(encoded, pa.binary()), "label": np.zeros(images, np.int32)}
    pq.write_table(pa.table(columns), folder / "images.parquet", row_group_size=256)
    return encoded


def ours(place: str, columns: list[str], **options: Any) -> Callable[[int], Any]:
    """Return what reads one epoch of a place with our reader.

    The files are taken as they are, without the checks by Spark that a user's call makes first.
    """
    from horovod_spark_runner import Dataset
    from horovod_spark_runner.data.materialize import DataRequest
    from horovod_spark_runner.data.parquet import open_parquet
    from horovod_spark_runner.data.schema import Roles
    from horovod_spark_runner.storage.filesystem import Location

    roles = Roles(tuple(columns), (), labelled=False)
    manifest = open_parquet(Location(place), DataRequest(roles, **options))
    assert manifest is not None
    data = Dataset(manifest)

    def read(epoch: int) -> None:
        batches = data.epoch(epoch, rank=0, size=1, batch_size=BATCH, as_tensors=True)
        assert sum(int(batch[columns[0]].shape[0]) for batch in batches) == data.rows

    return read


def raw(folder: Path) -> Callable[[int], Any]:
    """Return what reads all row groups into Arrow tables."""
    import pyarrow.parquet as pq

    def read(epoch: int) -> None:
        for path in sorted(folder.glob("*.parquet")):
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    file.read_row_group(group)

    return read


def decode_with_tf(encoded: list[bytes]) -> Callable[[int], Any]:
    """Return what decodes the images with tf.data."""
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(encoded)
    images = rows.map(tf.io.decode_jpeg, num_parallel_calls=tf.data.AUTOTUNE)
    batches = images.batch(BATCH).prefetch(tf.data.AUTOTUNE)

    def read(epoch: int) -> None:
        assert sum(int(batch.shape[0]) for batch in batches) == len(encoded)

    return read


def raw_remote(place: str) -> Callable[[int], Any]:
    """Return what reads all row groups in the object store, one after the other."""
    import pyarrow.parquet as pq

    system = far_away()

    def read(epoch: int) -> None:
        for info in system.get_file_info(pyarrow.fs.FileSelector(place)):
            with system.open_input_file(info.path) as stream, pq.ParquetFile(stream) as file:
                for group in range(file.num_row_groups):
                    file.read_row_group(group)

    return read


def scan_remote(place: str) -> Callable[[int], Any]:
    """Return what reads all rows with pyarrow's dataset scanner."""
    import pyarrow.dataset

    system = far_away()

    def read(epoch: int) -> None:
        source = pyarrow.dataset.dataset(place, filesystem=system)
        for _ in source.to_batches(batch_size=BATCH):
            pass

    return read


def far_away() -> Any:
    """Return pyarrow's client of the object store that the environment names."""
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    return pyarrow.fs.S3FileSystem(endpoint_override=endpoint, scheme="http")


def compare(rows: int, contenders: Contenders, repeats: int) -> dict[str, list[float]]:
    """Return rows per second of each contender, in turns, after a first time each."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, read in contenders.items():
            began = time.perf_counter()
            read(repeat)
            if repeat:
                rates[name].append(rows / (time.perf_counter() - began))
    return rates


def compare_with_petastorm(
    folder: Path, files: int, rows: int, width: int, repeats: int
) -> dict[str, list[float]]:
    """Write the files and compare all who read them."""
    write_files(folder, files, rows, width)
    contenders = {
        "our batches": ours(str(folder), ["features", "label"]),
        "raw pyarrow row groups": raw(folder),
    }
    rates = compare(files * rows, contenders, repeats)
    for _ in range(repeats):
        found = petastorm.read(folder, rows=files * rows, width=width, batch_size=BATCH, epochs=2)
        lost = found.pop("lost")
        for name, seconds in found.items():
            title = f"Petastorm `{name}`" + (f", {lost:,.0f} rows lost" if lost else "")
            rates.setdefault(title, []).append(files * rows / seconds)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="epochs of each (3)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    repeats = arguments.repeats
    folder = Path(tempfile.mkdtemp(prefix="hsr-benchmark-"))
    found: dict[str, dict[str, list[float]]] = {}
    try:
        title = f"20,000 rows of {WIDE:,} numbers"
        found[title] = compare_with_petastorm(folder / "wide", 4, 5_000, WIDE, repeats)
        title = f"10,000 files of 20 rows of {NARROW} numbers"
        found[title] = compare_with_petastorm(folder / "many", 10_000, 20, NARROW, repeats)
        encoded = write_images(folder / "images", 4_000)
        shapes = {"image": (SIDE, SIDE, 3)}
        contenders: Contenders = {
            "our batches": ours(str(folder / "images"), ["image", "label"], shapes=shapes),
            "tf.data's `decode_jpeg`, bytes in memory": decode_with_tf(encoded),
        }
        title = f"4,000 JPEG images of {SIDE} x {SIDE}"
        found[title] = compare(len(encoded), contenders, repeats)
        with object_store(LATENCY) as bucket:
            write_files(folder / "far", 8, 25_000, NARROW)
            place = f"{bucket.removeprefix('s3://')}/far"
            pyarrow.fs.copy_files(
                str(folder / "far"), place, destination_filesystem=far_away(), use_threads=False
            )
            contenders = {
                "our batches": ours(f"{bucket}/far", ["features", "label"]),
                "pyarrow, one row group after the other": raw_remote(place),
                "pyarrow's dataset scanner": scan_remote(place),
            }
            title = f"200,000 rows of {NARROW} numbers, {1000 * LATENCY:.0f} ms away"
            found[title] = compare(200_000, contenders, repeats)
    finally:
        shutil.rmtree(folder)
    rows = []
    for title, rates in found.items():
        own = statistics.median(rates["our batches"])
        for name, values in rates.items():
            rate = statistics.median(values)
            rows.append([title, name, f"{rate:,.0f}", f"{own / rate:.2f}", len(values)])
    text = f"One process, batches of {BATCH}, shuffled where they are ours; medians.\n\n" + table(
        ["what", "how", "rows/s", "ours ÷ this", "n"], rows
    )
    command = " ".join(["python benchmarks/reading.py", *sys.argv[1:]])
    present("Reading", command, text, arguments.write)


if __name__ == "__main__":
    main()
