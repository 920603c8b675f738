"""What is true on this machine's GPU: a table as it grows, and the same as JSON.

Each check runs in a process of its own with a limit, in order of worth, so that one that hangs
costs only itself. Without a GPU all runs on the CPU as far as it can, and what needs one says so.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.table import Table, judge, write_section  # noqa: E402

SIDE, CHANNELS, CLASSES = 32, 3, 10
FOLDER = "HSR_GPU_CHECK_FOLDER"


class Check(NamedTuple):
    """One check: a function that prints rows, and its limit in seconds."""

    run: Callable[[], None]
    limit: float


CHECKS: dict[str, Check] = {}


def check(limit: float) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a function to the checks, in order of worth."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[function.__name__] = Check(function, limit)
        return function

    return add


def row(name: str, figure: Any, goal: str, met: bool, *, gpu: bool = True) -> None:
    """Report one figure; with ``gpu``, its goal is meant for a GPU."""
    verdict = judge(met, needs_gpu=gpu, has_gpu=bool(gpus()))
    print(json.dumps([name, str(figure), goal, verdict]), flush=True)


@functools.cache
def gpus() -> list[str]:
    """Return the lines of ``nvidia-smi -L``; none without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


def folder() -> Path:
    return Path(os.environ[FOLDER])


def program(*command: str, timeout: float = 60, **changed: str | None) -> tuple[int, str]:
    """Run a program; return its exit status and what it printed."""
    env = {k: v for k, v in {**os.environ, **changed}.items() if v is not None}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    return done.returncode, done.stdout + done.stderr * bool(done.returncode)


# --- Spark -------------------------------------------------------------------------------------


def start_workers(action: str, *arguments: str, cores: int) -> str:
    """Start Spark's standalone master and a worker, or another worker; return the master's URL."""
    properties = folder() / "worker.conf"
    lines = ["spark.ui.enabled false"]
    if gpus():
        script = ROOT / "scripts" / "discover_gpus.sh"
        lines += ["spark.worker.resource.gpu.amount 1"]
        lines += [f"spark.worker.resource.gpu.discoveryScript {script}"]
    properties.write_text("\n".join(lines) + "\n")
    status, printed = program(
        str(ROOT / "scripts" / "standalone"), action, str(folder() / action), *arguments,
        "1", str(cores), "12g" if gpus() else "3g",
        HSR_VENV=sys.prefix, HSR_WORKER_PROPERTIES=str(properties),
    )  # fmt: skip
    if status:
        raise SystemExit(f"the standalone cluster did not start: {printed[-2000:]}")
    return printed.strip().splitlines()[-1] if printed.strip() else ""


@contextmanager
def session(task_gpus: float = 1, cores: int = 0) -> Iterator[Any]:
    """Yield a Spark session whose tasks have the GPU, where there is one."""
    from pyspark.sql import SparkSession

    each = cores or (4 if gpus() else 2)
    builder = SparkSession.builder.master(os.environ["HSR_GPU_CHECK_MASTER"])
    settings: dict[str, Any] = {
        "spark.executor.cores": each,
        "spark.task.cpus": 1 if task_gpus < 1 else each,
        "spark.executor.memory": "8g" if gpus() else "2g",
        "spark.dynamicAllocation.enabled": "false",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
    }
    if gpus():
        settings["spark.executor.resource.gpu.amount"] = 1
        settings["spark.task.resource.gpu.amount"] = task_gpus
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def each_rank() -> int:
    """Return how many GPUs a rank has."""
    return 1 if gpus() else 0


def on_rank(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Return what a function returns on the only rank."""
    from horovod_spark_runner import HorovodRunner

    settings.setdefault("num_workers", 1)
    runner = HorovodRunner(gpus_per_worker=each_rank(), stream_logs=False, **settings)
    return runner.run(function, *arguments).results[0]


def images(rows: int) -> Path:
    """Return a folder with Parquet files of images and labels."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = folder() / f"images-{rows}"
    if not place.exists():
        place.mkdir()
        rng = np.random.default_rng(0)
        values = rng.normal(size=(rows, CHANNELS * SIDE * SIDE)).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1])
        table = {
            "image": column.cast(pa.list_(pa.float32())),
            "label": pa.array(rng.integers(0, CLASSES, rows).astype(np.int64)),
        }
        pq.write_table(pa.table(table), place / "part-0.parquet", row_group_size=1024)
    return place


# The network's layers, which travel to the ranks; a CPU gets narrow ones.
WIDTHS = (64, 128, 256) if gpus() else (8, 16, 32)


def network() -> Any:
    from torch import nn

    layers: list[Any] = []
    before = CHANNELS
    for width in WIDTHS:
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * 16, CLASSES))


def make_model(autocast: Any = None, *, exact: bool = False, plain: bool = False) -> Any:
    import torch

    from horovod_spark_runner import TorchModel

    torch.manual_seed(1)
    if exact:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.allow_tf32 = False
    optimizer: Any = torch.optim.Adam
    if plain:  # Adam makes a full step of a gradient that is rounding alone
        optimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return TorchModel(network(), "CrossEntropyLoss", optimizer, autocast=autocast)


def new_run_dir() -> str:
    return tempfile.mkdtemp(prefix="run-", dir=folder())


def train(rows: int, model: Callable[[], Any] = make_model, **settings: Any) -> Any:
    from horovod_spark_runner import DataOptions, run_training

    settings = {"num_workers": 1, "batch_size": 64, "stream_logs": False, **settings}
    settings.setdefault("run_dir", new_run_dir())
    return run_training(
        str(images(rows)), model, feature_cols=["image"], label_cols=["label"],
        data=DataOptions(shapes={"image": (CHANNELS, SIDE, SIDE)}),
        gpus_per_worker=each_rank(), **settings,
    )  # fmt: skip


# --- The checks, in order of worth ---------------------------------------------------------------


@check(60)
def discovery() -> None:
    script = str(ROOT / "scripts" / "discover_gpus.sh")
    uuids = [line.rpartition("UUID: ")[2].rstrip(")") for line in gpus()]
    for how, names in (("index", [str(i) for i in range(len(uuids))]), ("uuid", uuids)):
        for visible in (None, "0", ""):
            expected = names if visible is None else names[:1] if visible else []
            _, text = program(script, HSR_GPU_ADDRESSES=how, CUDA_VISIBLE_DEVICES=visible)
            lines = [line for line in text.splitlines() if line.startswith("{")]
            found = json.loads(lines[-1])["addresses"] if lines else text[-80:]
            name = f"discover_gpus.sh, {how}, CUDA_VISIBLE_DEVICES {visible!r}"
            row(name, found, f"{len(expected)} of nvidia-smi's", found == expected)


@check(90)
def doctor() -> None:
    status, text = program("horovod-spark-runner", "doctor", timeout=270)
    wrong = [line for line in text.splitlines() if "FAIL" in line or "error" in line.lower()]
    row("doctor", wrong or f"exit {status}", "exit 0", status == 0, gpu=False)


def describe_rank() -> dict[str, Any]:
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "seen": seen}


@check(60)
def placement() -> None:
    from horovod_spark_runner import HorovodRunner

    with session():
        runner = HorovodRunner(num_workers=1, gpus_per_worker=each_rank(), stream_logs=False)
        result = runner.run(describe_rank)
        placed = list(result.placement[0].gpus)
        row("placement names the GPU", placed, "1 GPU", len(placed) == 1)
        row("the rank sees that one only", result.results[0], "1", result.results[0]["seen"] == 1)


def speed_by_hand(path: str, batch: int, autocast: bool, epochs: int) -> float:
    """Return the samples per second of a loop by hand on arrays in memory."""
    import contextlib

    import numpy as np
    import pyarrow.parquet as pq
    import torch

    table = pq.read_table(path)
    flat = table["image"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    x = torch.from_numpy(np.array(flat)).reshape(-1, CHANNELS, SIDE, SIDE)
    y = torch.from_numpy(np.array(table["label"]).copy())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module, loss_function = network().to(device), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(module.parameters())
    rates = []
    for _ in range(epochs):
        began = time.perf_counter()
        total = torch.zeros((), device=device)
        order: Any = torch.randperm(len(x))
        for rows in order.split(batch):
            inputs = x[rows].to(device, non_blocking=True)
            labels = y[rows].to(device, non_blocking=True)
            optimizer.zero_grad()
            context: Any = contextlib.nullcontext()
            if autocast:
                context = torch.autocast(device.type, torch.bfloat16)
            with context:
                loss = loss_function(module(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        float(total)
        rates.append(len(x) / (time.perf_counter() - began))
    return max(rates[1:])


def watch(target: str) -> Callable[[], list[Any]]:
    """Return a function that makes the callback that times and, once, profiles an epoch."""

    def make() -> list[Any]:
        import torch

        from horovod_spark_runner import TorchCallback

        class Watch(TorchCallback):
            def on_train_begin(self, module: Any) -> None:
                self.seen: dict[str, Any] = {"device": str(next(module.parameters()).device)}
                self.rates: list[float] = []
                self.profile: Any = None
                self.steps = 0

            def on_epoch_begin(self, epoch: int) -> None:
                self.began, self.steps = time.perf_counter(), 0
                if epoch == 1:
                    self.profile = torch.profiler.profile()
                    self.profile.start()

            def on_step_end(self, step: int, logs: Any) -> None:
                self.steps += 1
                if self.profile is not None and self.steps == 8:
                    self.profile.stop()
                    events = self.profile.key_averages()
                    copies = {e.key: e.count for e in events if "DtoH" in e.key}
                    self.seen["to_host"] = sum(copies.values())
                    self.profile = None

            def on_epoch_end(self, epoch: int, logs: Any) -> None:
                self.rates.append(1 / (time.perf_counter() - self.began))
                Path(target).write_text(json.dumps({**self.seen, "rates": self.rates}))

        return [Watch()]

    return make


@check(120)
def training() -> None:
    rows, batch, epochs = (16384, 256, 5) if gpus() else (512, 64, 4)
    with session():
        for autocast in (None, "bfloat16"):
            kind = autocast or "float32"
            target = folder() / f"watched-{kind}"
            model = train(
                rows, functools.partial(make_model, autocast), batch_size=batch, epochs=epochs,
                callbacks=watch(str(target)),
            )  # fmt: skip
            seen = json.loads(target.read_text())
            ours = rows * max(seen["rates"][2:])
            hand = on_rank(speed_by_hand, str(images(rows)), batch, bool(autocast), epochs)
            if autocast is None:
                row("the module is on it", seen["device"], "cuda", "cuda" in seen["device"])
                copies = seen.get("to_host")
                row("copies to the host in 8 steps", copies, "0", copies == 0)
                seconds = model.summary.timings
                waited = seconds.get("data", 0.0) / seconds["train"]
                row("waiting for data", f"{waited:.1%} of the steps", "≤ 3 %", waited <= 0.03)
            name = f"{kind}: samples/s ÷ a loop by hand"
            row(
                name,
                f"{ours / hand:.2f} ({ours:,.0f} ÷ {hand:,.0f})",
                "≥ 0.97",
                ours / hand >= 0.97,
            )


def reduce_on_gpu(sizes: list[int]) -> dict[str, Any]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {"nccl": int(hvd.nccl_built()), "device": device}
    for size in sizes:
        tensor = torch.ones(size << 18, device=device)
        for _ in range(2):
            began = time.perf_counter()
            result = hvd.allreduce(tensor, name=f"of {size} MB", op=hvd.Sum)
            total = float(result[0])
            seconds = time.perf_counter() - began
        found[str(size)] = [result.device.type, total, round(seconds * 1000, 1)]
    return found


@check(60)
def nccl() -> None:
    sizes = [1, 64, 512] if gpus() else [1, 8]
    with session():
        found = on_rank(reduce_on_gpu, sizes)
    row("Horovod has NCCL", found["nccl"], "a version", found["nccl"] > 0, gpu=False)
    for size in sizes:
        kind, total, ms = found[str(size)]
        assert total == 1
        row(f"allreduce of {size} MB, one rank", f"{ms} ms on {kind}", "on cuda", kind == "cuda")


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


# What deterministic algorithms need of cuBLAS.
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@contextmanager
def second_worker() -> Iterator[None]:
    """Add a worker that finds the same GPU."""
    try:
        start_workers("join", os.environ["HSR_GPU_CHECK_MASTER"], cores=4 if gpus() else 2)
        yield
    finally:
        program(str(ROOT / "scripts" / "standalone"), "stop", str(folder() / "join"))


def weights(model: Any) -> Any:
    import numpy as np

    state = model.getModel().state_dict()
    return np.concatenate([tensor.detach().cpu().numpy().ravel() for tensor in state.values()])


@check(120)
def sharing() -> None:
    import numpy as np

    from horovod_spark_runner import LaunchOptions

    plain = functools.partial(make_model, exact=True, plain=True)
    with second_worker(), session():
        try:
            train(512, num_workers=2)
            row("two ranks on one GPU", "trained", "refused by name", False)
        except Exception as error:
            told = describe_error(error)
            row("two ranks on one GPU", told, "refused by name", "share_gpus" in told)
        launch = LaunchOptions(share_gpus=True, stall_timeout=30, env=EXACT)
        together = train(512, plain, num_workers=2, batch_size=32, epochs=2, launch=launch)
        ranks = ", ".join(str(list(rank.gpus)) for rank in together.summary.placement)
        row("share_gpus=True", f"trained on {ranks}", "trained, through the host", True)
        alone, start = (
            weights(train(512, plain, batch_size=64, epochs=epochs, launch=launch))
            for epochs in (2, 1)
        )
        difference = float(np.abs(weights(together) - alone).max())
        moved = float(np.abs(alone - start).max())
        row(
            "two ranks and one process: largest difference of weights",
            f"{difference:.1e}, where epoch 2 changed them by {moved:.1e}",
            "≤ 1e-5",
            difference <= 1e-5 < moved,
            gpu=False,
        )


@check(60)
def warm() -> None:
    seconds = []
    with session():
        for _ in range(2):
            began = time.perf_counter()
            on_rank(describe_rank)
            seconds.append(time.perf_counter() - began)
        held = []
        if gpus():
            query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
            held = program(*query)[1].splitlines()
    row("GPU memory held between runs", held or "none", "none", not held)
    first, second = seconds
    row("second run", f"{second:.1f} s after {first:.1f} s", "faster", second < first, gpu=False)


def kill_once(marker: str) -> Callable[[], list[Any]]:
    """Return a function that makes the callback that kills its rank in epoch 3, the first time."""

    def make() -> list[Any]:
        from horovod_spark_runner import TorchCallback

        class Kill(TorchCallback):
            epoch = 0

            def on_epoch_begin(self, epoch: int) -> None:
                self.epoch = epoch

            def on_step_end(self, step: int, logs: Any) -> None:
                if self.epoch == 2 and step % 8 == 5 and not Path(marker).exists():
                    Path(marker).touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        return [Kill()]

    return make


@check(120)
def resume() -> None:
    import numpy as np

    from horovod_spark_runner import CheckpointOptions, LaunchOptions, RankFailedError

    with session():
        for exact in (True, False):
            kind = "deterministic" if exact else "as it is"
            settings: dict[str, Any] = {
                "model": functools.partial(make_model, exact=exact), "epochs": 4,
                "launch": LaunchOptions(env=EXACT if exact else {}),
            }  # fmt: skip
            whole = weights(train(512, **settings))
            again = {
                **settings, "run_dir": str(folder() / f"killed-{kind}"),
                "checkpoints": CheckpointOptions(every_steps=3),
                "callbacks": kill_once(str(folder() / f"was-killed-{kind}")),
            }  # fmt: skip
            with suppress(RankFailedError):
                train(512, **again)
            resumed = weights(train(512, **again))
            lines = (Path(again["run_dir"]) / "attempts.jsonl").read_text().splitlines()
            steps = [json.loads(line)["first_step"] for line in lines]
            if exact:
                row("killed by a signal, resumed from step", steps, "[0, 16 to 21]",
                    len(steps) == 2 and 16 <= steps[1] < 22, gpu=False)  # fmt: skip
            difference = float(np.abs(whole - resumed).max())
            goal, met = ("0", difference == 0) if exact else ("reported", True)
            row(f"killed and resumed, {kind}: largest difference of weights", difference, goal,
                met, gpu=False)  # fmt: skip


def plain_rows(path: str, batch: int) -> float:
    """Return the rows per second of the module in a plain loop."""
    import numpy as np
    import pyarrow.parquet as pq
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = network().to(device).eval()
    best = 0.0
    for _ in range(2):
        began = time.perf_counter()
        rows = 0
        for piece in pq.ParquetFile(f"{path}/part-0.parquet").iter_batches(batch):
            flat = np.array(piece["image"].flatten())
            x = torch.from_numpy(flat).reshape(-1, CHANNELS, SIDE, SIDE).to(device)
            with torch.inference_mode():
                module(x).cpu().numpy()
            rows += len(x)
        best = max(best, rows / (time.perf_counter() - began))
    return best


def make_udf() -> Any:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = network().to(device).eval()

    def predict(image: Any) -> Any:
        with torch.inference_mode():
            x = torch.from_numpy(image).reshape(-1, CHANNELS, SIDE, SIDE).to(device)
            return module(x).cpu().numpy()

    return predict


@check(120)
def prediction() -> None:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    rows = 16384 if gpus() else 1024
    path = str(images(rows))

    def speed(frame: Any) -> float:
        rates = []
        for _ in range(2):
            began = time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            rates.append(rows / (time.perf_counter() - began))
        return max(rates)

    for tasks in (1, 2):
        with session(task_gpus=1 if tasks == 1 else 0.5, cores=0 if tasks == 1 else 2) as spark:
            if tasks == 1:
                model = train(512, run_dir=str(folder() / "predicting"))
                plain = on_rank(plain_rows, path, 1024)
            frame = spark.read.parquet(path).repartition(tasks).cache()
            frame.count()
            rate = speed(model.transform(frame))
            if tasks == 1:
                udf = predict_batch_udf(
                    make_udf, return_type=ArrayType(FloatType()), batch_size=1024,
                    input_tensor_shapes=[[CHANNELS * SIDE * SIDE]],
                )  # fmt: skip
                theirs = speed(frame.select(udf("image").alias("p")))
                row("transform ÷ a plain loop", f"{rate / plain:.2f} ({rate:,.0f} rows/s)",
                    "reported", True)  # fmt: skip
                row("transform ÷ predict_batch_udf", f"{rate / theirs:.2f}", "≥ 1",
                    rate / theirs >= 1)  # fmt: skip
            else:
                row("two tasks on one GPU", f"{rate:,.0f} rows/s", "predict", rate > 0)


def make_greedy() -> Any:
    import torch

    from horovod_spark_runner import TorchModel

    class Greedy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(CHANNELS * SIDE * SIDE, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.is_cuda:
                torch.empty(1 << 42, device=x.device)
            outputs: torch.Tensor = self.last(x.flatten(1))
            return outputs

    return TorchModel(Greedy(), "CrossEntropyLoss", torch.optim.SGD)


@check(60)
def memory() -> None:
    with session():
        try:
            train(512, make_greedy)
            told = "trained"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    met = told.startswith("RankFailedError") and "GiB" in told and "batch_size" in told
    row("out of GPU memory", told[:200], "RankFailedError with sizes and batch_size", met)


def distributed_program() -> dict[str, Any]:
    import torch
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    device = "cuda" if on_gpu else "cpu"
    one = torch.ones(4, device=device)
    distributed.all_reduce(one)
    found: dict[str, Any] = {"sum": float(one[0]), "backend": distributed.get_backend()}
    mesh = distributed.device_mesh.init_device_mesh(device, (distributed.get_world_size(),))
    module: Any = fully_shard(torch.nn.Linear(64, 64).to(device), mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        loss = module(torch.ones(8, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found["fsdp_loss"] = float(loss)
    distributed.destroy_process_group()
    return found


@check(60)
def distributed() -> None:
    with session():
        found = on_rank(distributed_program)
    row("torch.distributed in HorovodRunner", found["backend"], "nccl", found["backend"] == "nccl")
    row("FSDP2, loss after 3 steps", found["fsdp_loss"], "finite", found["fsdp_loss"] >= 0)


def make_keras() -> Any:
    import keras

    layers = [keras.layers.Input((CHANNELS * SIDE * SIDE,)), keras.layers.Dense(CLASSES)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def keras_devices() -> int:
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


@check(120)
def keras() -> None:
    from horovod_spark_runner import run_training

    with session():
        seen = on_rank(keras_devices)
        row("TensorFlow sees the GPU", seen, "1", seen == 1)
        model = run_training(
            str(images(512)), make_keras, feature_cols=["image"], label_cols=["label"],
            num_workers=1, gpus_per_worker=each_rank(), stream_logs=False, run_dir=new_run_dir(),
        )  # fmt: skip
        loss = model.summary.history[-1]["loss"]
        row("Keras trains on it", f"loss {loss:.3f}", "finite", loss == loss)


# --- Running them ---------------------------------------------------------------------------------


def end_group(running: subprocess.Popen[str]) -> None:
    """End a check with all that it started, such as Spark's driver."""
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


def run_check(name: str, limit: float, table: Table) -> None:
    """Run one check in a process of its own, and add its rows as they come."""
    log = folder() / f"{name}.log"
    began = time.monotonic()
    with log.open("w") as errors:
        running = subprocess.Popen(
            [sys.executable, __file__, "--one", name],
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        late = threading.Timer(limit, end_group, [running])
        late.start()
        assert running.stdout is not None
        try:
            for line in running.stdout:
                if line.startswith("["):
                    table.add(*json.loads(line))
            status = running.wait()
        finally:
            late.cancel()
            end_group(running)
    table.add_seconds(name, time.monotonic() - began)
    if status == -signal.SIGKILL:
        table.add(name, f"ended after {limit:.0f} s", "in time", "out of time")
    elif status:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit {status}"]
        table.add(name, last[0][:200], "runs", "failed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=480, help="seconds for all (480)")
    parser.add_argument("--keras", action="store_true", help="Keras only; needs TensorFlow")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json", help="result")
    parser.add_argument("--write", action="store_true", help="fill docs/benchmarks.md")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), default=[], metavar="CHECK")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        CHECKS[arguments.one].run()
        sys.stdout.flush()
        return 0
    # Ends by an exception, so that Spark's daemons are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = arguments.only or [n for n in CHECKS if (n == "keras") == arguments.keras]
    deadline = time.monotonic() + arguments.budget
    table = Table(arguments.json, gpus())
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as place:
        os.environ[FOLDER] = place
        os.environ["PYSPARK_PYTHON"] = sys.executable
        try:
            cores = 4 if gpus() else 2
            os.environ["HSR_GPU_CHECK_MASTER"] = start_workers("start", cores=cores)
            for name in chosen:
                left = deadline - time.monotonic()
                if left < 5:
                    table.add(name, "", "", "not reached")
                else:
                    run_check(name, min(CHECKS[name].limit * (1 if gpus() else 3), left), table)
        finally:
            for action in ("start", "join"):
                if (Path(place) / action).exists():
                    program(str(ROOT / "scripts/standalone"), "stop", str(Path(place) / action))
            if logs := [p for p in Path(place).glob("*.log") if p.stat().st_size]:
                kept = arguments.json.with_suffix(".logs")
                kept.mkdir(parents=True, exist_ok=True)
                for log in logs:
                    shutil.copy(log, kept)
    status = table.finish()
    if arguments.write:
        result = json.loads(arguments.json.read_text())
        write_section(ROOT / "docs" / "benchmarks.md", result)
    return status


if __name__ == "__main__":
    sys.exit(main())
