"""Reading what is hard to read: wide rows, images, many small files, a distant object store.

One process reads one shuffled epoch of each, our reader against the others in turns:

* rows of 4,096 numbers, and 10,000 files of 20 rows: raw pyarrow, one row group after the other,
  and Petastorm's readers, each with the best number of workers;
* JPEG images of 128 x 128 in a column of bytes: tf.data's own ``decode_jpeg`` on all cores, its
  bytes in memory already;
* row groups in an object store whose answers take 30 ms: pyarrow through the same file system, one
  row group after the other, and pyarrow's dataset scanner, which reads ahead on threads.

Our manifest is made before the clock starts; pyarrow has the footers of all files before, too.

Usage: python benchmarks/reading.py [--repeats 3] [--write]
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
from peers import petastorm_environment as petastorm
from peers.static_store import static_store
from report import present, shown_command, table

BATCH = 256
WIDE = 4096
NARROW = 64
LATENCY = 0.03
SIDE = 128
# Files that pyarrow's scanner reads at a time.
READ_AHEAD = 16
IN_TURN = "raw pyarrow, one row group after the other"

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
    from horovod_spark_runner.data.prepare.columns import DataRequest
    from horovod_spark_runner.data.prepare.parquet import open_parquet
    from horovod_spark_runner.data.prepare.schema import Roles
    from horovod_spark_runner.storage.filesystem import Location

    roles = Roles(tuple(columns), (), labelled=False)
    manifest = open_parquet(Location(place), DataRequest(roles, **options))
    assert manifest is not None
    data = Dataset(manifest)

    def read(epoch: int) -> None:
        batches = data.epoch(epoch, rank=0, size=1, batch_size=BATCH, as_tensors=True)
        assert sum(int(batch[columns[0]].shape[0]) for batch in batches) == data.rows

    return read


def raw(system: pyarrow.fs.FileSystem, place: str) -> Callable[[int], Any]:
    """Return what reads all row groups into tables, one after the other; footers are known."""
    import pyarrow.parquet as pq

    footers = {
        info.path: pq.read_metadata(info.path, filesystem=system)
        for info in list_files(system, place)
    }

    def read(epoch: int) -> None:
        for path, footer in footers.items():
            with (
                system.open_input_file(path) as stream,
                pq.ParquetFile(stream, metadata=footer) as file,
            ):
                for group in range(file.num_row_groups):
                    file.read_row_group(group)

    return read


def scan(system: pyarrow.fs.FileSystem, place: str) -> Callable[[int], Any]:
    """Return what reads all rows with pyarrow's dataset scanner; footers are known."""
    import pyarrow.dataset

    kind = pyarrow.dataset.ParquetFileFormat()
    fragments = [
        kind.make_fragment(info.path, system, file_size=info.size)
        for info in list_files(system, place)
    ]
    for fragment in fragments:
        fragment.ensure_complete_metadata()
    rows = sum(fragment.metadata.num_rows for fragment in fragments)
    source = pyarrow.dataset.FileSystemDataset(
        fragments, fragments[0].physical_schema, kind, filesystem=system
    )

    def read(epoch: int) -> None:
        batches = source.to_batches(fragment_readahead=READ_AHEAD)
        assert sum(batch.num_rows for batch in batches) == rows

    return read


def list_files(system: pyarrow.fs.FileSystem, place: str) -> list[pyarrow.fs.FileInfo]:
    """Return the files in a folder, sorted by path."""
    found = system.get_file_info(pyarrow.fs.FileSelector(place))
    return sorted(found, key=lambda info: info.path)


def decode_with_tf(encoded: list[bytes]) -> Callable[[int], Any]:
    """Return what decodes the images with tf.data."""
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(encoded)
    images = rows.map(tf.io.decode_jpeg, num_parallel_calls=tf.data.AUTOTUNE)
    batches = images.batch(BATCH).prefetch(tf.data.AUTOTUNE)

    def read(epoch: int) -> None:
        assert sum(int(batch.shape[0]) for batch in batches) == len(encoded)

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
) -> tuple[dict[str, list[float]], float]:
    """Write the files and compare all who read them; return also the rows Petastorm lost."""
    write_files(folder, files, rows, width)
    contenders = {
        "our batches": ours(str(folder), ["features", "label"]),
        IN_TURN: raw(pyarrow.fs.LocalFileSystem(), str(folder)),
    }
    rates = compare(files * rows, contenders, repeats)
    lost = 0.0
    # Petastorm takes several minutes for thousands of files.
    for _ in range(repeats if files < 1000 else 1):
        found = petastorm.read(folder, rows=files * rows, width=width, batch_size=BATCH, epochs=2)
        lost += found.pop("lost")
        for name, seconds in found.items():
            rates.setdefault(f"Petastorm `{name}`", []).append(files * rows / seconds)
    return rates, lost


def tell_lost(lost: dict[str, float]) -> str:
    """Say how many rows Petastorm did not give, by what was read. Pure."""
    parts = [f"{number:,.0f} ({title})" for title, number in lost.items() if number]
    if not parts:
        return "Petastorm's readers gave all rows."
    return (
        f"Rows that Petastorm's readers never gave: {'; '.join(parts)}; all readers, numbers of "
        "workers and epochs added up."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="epochs of each (3)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    repeats = arguments.repeats
    folder = Path(tempfile.mkdtemp(prefix="hsr-benchmark-"))
    found: dict[str, dict[str, list[float]]] = {}
    lost: dict[str, float] = {}
    try:
        title = f"20,000 rows of {WIDE:,} numbers"
        found[title], lost[title] = compare_with_petastorm(folder / "wide", 4, 5_000, WIDE, repeats)
        title = f"10,000 files of 20 rows of {NARROW} numbers"
        found[title], lost[title] = compare_with_petastorm(
            folder / "many", 10_000, 20, NARROW, repeats
        )
        encoded = write_images(folder / "images", 4_000)
        shapes = {"image": (SIDE, SIDE, 3)}
        contenders: Contenders = {
            "our batches": ours(str(folder / "images"), ["image", "label"], shapes=shapes),
            "tf.data's `decode_jpeg`, bytes in memory": decode_with_tf(encoded),
        }
        title = f"4,000 JPEG images of {SIDE} x {SIDE}"
        found[title] = compare(len(encoded), contenders, repeats)
        write_files(folder / "bucket" / "far", 8, 25_000, NARROW)
        with static_store(folder / "bucket", LATENCY) as bucket:
            place = f"{bucket.removeprefix('s3://')}/far"
            contenders = {
                "our batches": ours(f"{bucket}/far", ["features", "label"]),
                IN_TURN: raw(far_away(), place),
                "pyarrow's dataset scanner": scan(far_away(), place),
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
    columns = ["what", "how", "rows/s", "ours ÷ this", "n"]
    text = (
        f"One process, batches of {BATCH}, shuffled where they are ours; medians. Footers of files "
        "are known beforehand to pyarrow, as our manifest is to us. The object store's server, "
        "which gives out files late and does nothing else, runs on the same cores.\n\n"
        f"{table(columns, rows)}\n\n{tell_lost(lost)}"
    )
    present("Reading", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
