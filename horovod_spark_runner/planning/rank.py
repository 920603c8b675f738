"""Measurements on a rank: steps, sums over all ranks, and its reader."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from ..checkpoint.model_state import broadcast
from ..cluster.worker.reporting import report_progress
from ..data.read.reader import DatasetReader
from ..machine import usable_cores
from ..sync.synchroniser import Collectives
from ..training.engine import engine_named
from ..training.epochs import NOTHING, Epochs, Step
from ..training.loop import SYNCHRONISERS
from ..training.spec import TrainingSpec, provide_steps
from ..training.trainee import Trainee
from .measurement import RankFigures
from .model import StepTime

# Steps train on the same batches in memory, so that the reader does not interfere.
_BATCHES, _BATCHES_BYTES = 16, 64 << 20
_WARM_STEPS, _MOST_STEPS = 3, 2000
# Sizes of the sums that latency and bandwidth are fitted to, besides the model's own.
_SUM_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)


def measure(spec: TrainingSpec, seconds: float, cached: bool) -> RankFigures:
    """Measure on this rank, together with all others.

    Args:
        spec: the training.
        seconds: how long to train, and to read, about.
        cached: whether a rank keeps the rows it has read.

    Raises:
        HorovodSparkError: see `horovod_spark_runner.training.loop.train`.
    """
    began = time.perf_counter()
    world = MPI.COMM_WORLD
    engine = engine_named(spec.engine)
    engine.begin(spec.fit.seed, os.environ)
    collectives = engine.collectives()
    trainee = _build(spec, world, collectives)
    built = time.perf_counter()
    # Nothing is cached: each pass reads from storage, as the first epoch does.
    reader = DatasetReader(spec.train, trainee.columns, spec.config.data.transforms, 0)
    with contextlib.closing(reader):
        batches = _load_batches(spec, world, reader)
        first = _time_calls(lambda: trainee.train_step(batches[0], NOTHING, False), 1)
        # Before the sums: large ones leave queues full and connections slow.
        step, exchange = _time_steps(trainee, batches, world, seconds)
    gradient_bytes = _gradient_bytes(trainee)
    sums = {}
    if world.Get_size() > 1:
        for size in sorted({*_SUM_BYTES, gradient_bytes}):
            sums[size] = _time_sum(world, collectives, size)
    rows, cpu = _time_reading(spec, world, trainee, seconds, cached)
    return RankFigures(
        build=built - began,
        first_step=first,
        step=step,
        exchange=exchange,
        sums=sums,
        latency=_time_mpi(world),
        gradient_bytes=gradient_bytes,
        reader_rows=rows,
        reader_cpu_seconds=cpu,
        cores=usable_cores(),
    )


def _build(spec: TrainingSpec, world: MPI.Comm, collectives: Collectives) -> Trainee:
    """Build the model, the same on all ranks."""
    synchroniser = SYNCHRONISERS[type(spec.config.sync)](spec.config.sync, collectives)
    with provide_steps(spec.steps):
        trainee = engine_named(spec.engine).trainee(spec, world, synchroniser)
    broadcast(trainee.variables, world)
    trainee.variables_were_set()
    trainee.variables.separate_seeds(world.Get_rank())
    trainee.separate_random_streams(world.Get_rank())
    synchroniser.begin(trainee.variables)
    return trainee


def _gradient_bytes(trainee: Trainee) -> int:
    variables = trainee.variables
    trained = (
        np.asarray(variables.view(variable))
        for name, variable in variables.named.items()
        if name.startswith("model/") and variables.is_trained(variable)
    )
    return sum(value.nbytes for value in trained if value.dtype.kind in "fV")


def _epochs(spec: TrainingSpec, world: MPI.Comm, reader: DatasetReader) -> Epochs:
    ranks, fit = world.Get_size(), replace(spec.fit, steps_per_epoch=None)
    step_rows = fit.batch_size * ranks
    window = spec.config.data.window_bytes
    return Epochs(reader, spec.train, fit, step_rows, window, world.Get_rank(), ranks)


def _load_batches(spec: TrainingSpec, world: MPI.Comm, reader: DatasetReader) -> list[Step]:
    """Load full steps of all ranks into memory; the driver has checked that the rows fill one."""
    loaded: list[Step] = []
    room = _BATCHES_BYTES
    with contextlib.closing(_epochs(spec, world, reader).steps_from(0)) as steps:
        for step in itertools.islice(steps, _BATCHES):
            if not step.equal:
                break
            # The reader's arrays are parts of chunks, which would stay in memory as a whole.
            arrays = {name: values.copy() for name, values in step.batch.arrays.items()}
            loaded.append(replace(step, batch=replace(step.batch, arrays=arrays)))
            room -= sum(values.nbytes for values in arrays.values())
            if room < 0:
                break
    return loaded[: min(world.allgather(len(loaded)))]


def _time_steps(
    trainee: Trainee, batches: list[Step], world: MPI.Comm, seconds: float
) -> tuple[StepTime, float | None]:
    """Return the time of a step, and of its exchange if the framework separates it."""
    endless = itertools.cycle(batches)
    took = _time_calls(lambda: trainee.train_step(next(endless), NOTHING, False), _WARM_STEPS)
    count = _agree_on_count(world, seconds / took)
    before, cpu = trainee.exchange_seconds(), time.process_time()
    moments = [time.perf_counter()]
    for step in itertools.islice(endless, count):
        trainee.train_step(step, NOTHING, False)
        moments.append(time.perf_counter())
        report_progress()
    cpu = time.process_time() - cpu
    each = np.diff(moments)
    # The slowest twentieth are interruptions by other processes.
    usual = np.sort(each)[: max(1, len(each) - len(each) // 20)]
    after = trainee.exchange_seconds()
    exchange = None if after is None or before is None else (after - before) / count
    return StepTime(float(each.mean()), cpu / count, float(usual.std())), exchange


def _time_reading(
    spec: TrainingSpec, world: MPI.Comm, trainee: Trainee, seconds: float, cached: bool
) -> tuple[float, float]:
    """Return rows per second of a first pass, and the processor time of a row.

    Cached rows are written to memory that was never used before, which may cost more than reading
    them: one whole pass is measured. Otherwise passes are read for ``seconds``.
    """
    window = spec.train.size if cached else 0
    reader = DatasetReader(spec.train, trainee.columns, spec.config.data.transforms, window)
    with contextlib.closing(reader):
        epochs = _epochs(spec, world, reader)
        world.Barrier()
        began, cpu, rows = time.perf_counter(), time.process_time(), 0
        for number in itertools.count():
            with contextlib.closing(epochs.steps_from(number)) as steps:
                for step in steps:
                    rows += step.batch.rows
                    report_progress()
                    if not cached and time.perf_counter() - began > seconds:
                        break
            spent = time.perf_counter() - began
            if cached or spent > seconds / 2:
                break
    rows = max(rows, 1)
    return rows / spent, (time.process_time() - cpu) / rows


def _time_sum(world: MPI.Comm, collectives: Collectives, size: int) -> float:
    """Return the mean seconds of a sum of so many bytes of each rank."""
    numbers = np.zeros(max(1, size // 4), np.float32)

    def add_up() -> None:
        collectives.sum([numbers], f"plan.{size}")

    count = _agree_on_count(world, 0.3 / _time_calls(add_up, 2))
    world.Barrier()
    seconds = _time_calls(add_up, count)
    report_progress()
    return seconds


def _time_mpi(world: MPI.Comm) -> float:
    """Return the seconds of MPI's own sum of one number; 0 for one rank."""
    if world.Get_size() == 1:
        return 0.0
    own, summed = np.zeros(1), np.zeros(1)
    _time_calls(lambda: world.Allreduce(own, summed), 10)
    return _time_calls(lambda: world.Allreduce(own, summed), 200)


def _time_calls(act: Callable[[], object], times: int) -> float:
    """Return the mean seconds of so many calls."""
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times


def _agree_on_count(world: MPI.Comm, wanted: float) -> int:
    """Return how often all ranks repeat something: rank 0's number, within bounds."""
    return int(world.bcast(min(max(int(wanted), 5), _MOST_STEPS)))
