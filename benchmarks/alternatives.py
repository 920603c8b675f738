"""What users would pick instead: the same Parquet files, network, batch and epochs, two workers.

35,940 images of 24 x 24, batches of 64 per worker, by complete scripts (``peers/alternatives``):

* DistributedDataParallel under torchrun, rows in memory, whole batches taken out of tensors;
* the same loop by Spark's TorchDistributor;
* Ray Train with Ray Data, in an environment of its own (``.venvs/ray``);
* Keras in one process on both cores, batches of 128;
* ``run_training`` with PyTorch and with Keras.

Of each: seconds from the command to the trained model; of a second call in the same session;
samples per second in the epochs after the first; the peak memory of all its processes (PSS); lines
of the script without the network. All threads of a worker are limited to one core.

Usage: python benchmarks/alternatives.py [--rounds N] [--epochs N] [--without NAME ...] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from model import SIDE, make_arrays
from report import ROOT, goal, present, shown_command, table

FOLDER = Path(__file__).resolve().parent / "peers" / "alternatives"
RAY = ROOT / ".venvs" / "ray"
RAY_PACKAGE = "ray[data,train]==2.60.0"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# Name: what starts its script.
CONTENDERS = {
    "DDP under torchrun": (*TORCHRUN, "ddp.py"),
    "TorchDistributor": ("torch_distributor.py",),
    "Ray Train": ("ray_train.py",),
    "Keras, one process": ("plain_keras.py",),
    "run_training, PyTorch": ("ours_torch.py",),
    "run_training, Keras": ("ours_keras.py",),
}
DISTRIBUTED = ("DDP under torchrun", "TorchDistributor", "Ray Train")


@dataclass(frozen=True)
class Result:
    """What one run of a contender gave.

    Attributes:
        cold: seconds from the command to the trained model.
        warm: seconds of a later call of the same session; of a command without one, all its own.
        rate: samples per second in the epochs after the first.
        memory: peak PSS of all processes, in bytes.
    """

    cold: float
    warm: float
    rate: float
    memory: int


def write_rows(path: Path) -> int:
    """Write the images as eight Parquet files; return their number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images, labels = make_arrays()
    flat = pa.FixedSizeListArray.from_arrays(pa.array(images.ravel()), SIDE * SIDE)
    rows = pa.table({"image": flat.cast(pa.list_(pa.float32())), "label": labels})
    path.mkdir()
    each = -(-rows.num_rows // 8)
    for part in range(8):
        pq.write_table(rows.slice(part * each, each), path / f"part-{part}.parquet")
    return rows.num_rows


def python_of(name: str) -> str:
    """Return the interpreter for a contender; make Ray's environment if it is missing.

    It sees the packages of this one, so that PyTorch is the same.
    """
    if name != "Ray Train":
        return sys.executable
    python = RAY / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", RAY], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", RAY_PACKAGE], check=True)
        (site,) = (RAY / "lib").glob("python3*/site-packages")
        (own,) = (Path(sys.prefix) / "lib").glob("python3*/site-packages")
        (site / "beside.pth").write_text(f"{own}\n")
    return str(python)


@contextlib.contextmanager
def peak_memory(process: psutil.Process) -> Iterator[list[int]]:
    """Give a list with the largest sum of PSS of a process and all below it so far."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.3):
            total = 0
            with contextlib.suppress(psutil.Error):
                for one in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        total += one.memory_full_info().pss
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def run(name: str, data: Path, rows: int, epochs: int) -> Result:
    """Run a contender."""
    *options, script = CONTENDERS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = [
            python_of(name),
            *options,
            str(FOLDER / script),
            str(data),
            str(epochs),
            str(out),
        ]
        threads = {} if name == "Keras, one process" else {"OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, "TF_CPP_MIN_LOG_LEVEL": "2"}
        environment["PYSPARK_PYTHON"] = sys.executable
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(FOLDER.parents[1]), str(FOLDER), str(ROOT)]
        )
        began = time.time()
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            with peak_memory(psutil.Process(process.pid)) as peak:
                status = process.wait()
        whole = time.time() - began
        if status:
            raise SystemExit(f"{name} failed:\n{Path(folder, 'log').read_text()[-4000:]}")
        seconds = json.loads(out.read_text())
        calls = [Path(f"{out}.call-{call}") for call in range(2)]
        if calls[0].exists():
            noted = [[float(part) for part in call.read_text().split()] for call in calls]
            cold, warm = noted[0][1] - began, noted[1][0]
        else:
            cold = warm = whole
        rate = rows / statistics.median(seconds[1:])
        return Result(cold, warm, rate, peak[0])


def lines_of(script: str) -> int:
    """Return how many lines of code a script has, without comments, texts and measuring."""
    lines = (FOLDER / script).read_text().split('"""', 2)[2].splitlines()
    return sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    names = [name for name in CONTENDERS if name not in arguments.without]
    found: dict[str, list[Result]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows")
        rows = write_rows(data)
        for round_ in range(arguments.rounds):
            for name in names:
                found[name].append(result := run(name, data, rows, arguments.epochs))
                print(f"round {round_ + 1}: {name}: {result}", flush=True)

    def median(name: str, what: str) -> float:
        return statistics.median(getattr(one, what) for one in found[name])

    cells = [
        [
            name,
            f"{median(name, 'cold'):.1f} s",
            f"{median(name, 'warm'):.1f} s",
            f"{median(name, 'rate'):,.0f}",
            f"{median(name, 'memory') / 2**30:.1f} GiB",
            lines_of(CONTENDERS[name][-1]),
        ]
        for name in names
    ]
    peers = [name for name in DISTRIBUTED if name in names]
    ours, ddp = "run_training, PyTorch", "DDP under torchrun"
    goals = []
    for what, most in (("cold", 0.7), ("warm", 0.4)):
        best = min(median(name, what) for name in peers)
        goals.append(goal(f"{what} / the best other", median(ours, what) / best, at_most=most))
    goals.append(goal("steps / DDP", median(ours, "rate") / median(ddp, "rate"), at_least=0.97))
    text = "\n\n".join(
        [
            f"Two workers, {rows:,} images, {arguments.epochs} epochs, {arguments.rounds} rounds.",
            table(["what", "cold", "warm", "samples/s", "memory", "lines"], cells),
            table(["Ratio", "Measured", "Goal", "Met"], goals),
        ]
    )
    present("Alternatives", shown_command(), text, arguments.write)


if __name__ == "__main__":
    main()
