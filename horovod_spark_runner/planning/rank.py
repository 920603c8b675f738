"""What a rank measures for a plan: steps, sums over all ranks, and its reader."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from ..data.read.reader import DatasetReader
from ..errors import DataError, ModelError
from ..launch.shared.affinity import keep_to, share_of_cores, side_by_side
from ..launch.worker.reporting import report_progress
from ..training.agreement import NOTHING
from ..training.engine import engine_named
from ..training.epochs import Epochs, Step
from ..training.spec import TrainingSpec
from ..training.state import broadcast
from ..training.sync.noise import NoiseSynchroniser, SquaringCollectives
from ..training.sync.synchroniser import Collectives, Synchroniser
from ..training.trainee import Trainee
from ..training.ways import SYNCHRONISERS
from .cores import usable_cores
from .figures import Question, RankFigures, Shared, StepFigures
from .reading import read_at_first

# Batches that are trained on again and again, so that no reader is in the way: at most so many.
_BATCHES, _BATCHES_BYTES = 16, 64 << 20
_WARM_STEPS, _MOST_STEPS = 3, 2000
# Steps that the gradient noise scale is told from, where they are not slow.
_NOISE_STEPS = 500
# Bytes of the sums that tell latency and bandwidth, besides the model's own.
SUM_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)


def measure(question: Question) -> RankFigures:
    """Measure on this rank; see `measure_rank`."""
    began = time.perf_counter()
    spec, world = question.spec, MPI.COMM_WORLD
    engine = engine_named(spec.engine)
    engine.begin(spec.fit.seed, os.environ)
    collectives = engine.collectives()
    trainee = _built(spec, world, SYNCHRONISERS[type(spec.sync)](spec.sync, collectives))
    built = time.perf_counter()
    measuring = _Measuring(question, world, trainee)
    with contextlib.closing(measuring):
        first = measuring.first_step()
        gradient_bytes, model_bytes = measuring.sizes()
        # Before the sums: large ones leave queues full, and connections at a slow pace.
        steps = {size: measuring.steps(size) for size in question.batch_sizes}
        sums = {}
        if world.Get_size() > 1:
            for size in sorted({*SUM_BYTES, gradient_bytes, model_bytes}):
                sums[size] = _sum_seconds(world, collectives, size)
        rows, cpu = measuring.reading()
    return RankFigures(
        build=built - began,
        first_step=first,
        steps={size: figures for size, figures in steps.items() if figures is not None},
        sums=sums,
        latency=_latency(world),
        gradient_bytes=gradient_bytes,
        model_bytes=model_bytes,
        reader_rows=rows,
        reader_cpu_seconds=cpu,
        cores=usable_cores(),
        noise=_noise(question, world, collectives) if question.noise else None,
    )


def measure_on_shared_cores(question: Question) -> Shared:
    """Measure on this rank, beside others on its core; see `measure_shared`.

    Raises:
        DataError: the rows do not fill a step of all ranks.
    """
    spec, world = question.spec, MPI.COMM_WORLD
    per_core = _share_cores(world, question.per_core)
    engine = engine_named(spec.engine)
    engine.begin(spec.fit.seed, os.environ)
    trainee = _built(spec, world, SYNCHRONISERS[type(spec.sync)](spec.sync, engine.collectives()))
    with contextlib.closing(_Measuring(question, world, trainee)) as measuring:
        measuring.first_step()
        steps = measuring.steps(spec.fit.batch_size)
        if steps is None:
            raise DataError(f"the rows do not fill a step of {world.Get_size()} ranks")
        _, cpu = measuring.reading()
    return Shared(steps.seconds, per_core, cpu)


def _share_cores(world: MPI.Comm, per_core: int) -> float:
    """Keep so many ranks of each host to a core; return how many share one."""
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = local.Get_size()
    every = side_by_side(set().union(*local.allgather(os.sched_getaffinity(0))))
    cores = every[: max(1, ranks // per_core)]
    # As ranks of a training are bound.
    own = share_of_cores(cores, local.Get_rank(), ranks, 1, len(cores)) or cores
    local.Free()
    keep_to(own)
    return ranks / len(cores)


def _built(spec: TrainingSpec, world: MPI.Comm, synchroniser: Synchroniser) -> Trainee:
    """Return the model of a training, the same on all ranks."""
    trainee = engine_named(spec.engine).trainee(spec, world, synchroniser)
    broadcast(trainee.variables, world)
    trainee.variables_were_set()
    trainee.variables.separate_seeds(world.Get_rank())
    trainee.separate(world.Get_rank())
    synchroniser.begin(trainee.variables)
    return trainee


def _noise(question: Question, world: MPI.Comm, collectives: Collectives) -> tuple[float, float]:
    """Return the mean squares of gradients in the first steps of the training.

    Raises:
        ModelError: the engine does not tell them.
    """
    spec = question.spec
    if not isinstance(collectives, SquaringCollectives):
        raise ModelError(f"noise_scale: engine {spec.engine!r} does not tell it")
    synchroniser = NoiseSynchroniser(collectives)
    measuring = _Measuring(question, world, _built(spec, world, synchroniser))
    with contextlib.closing(measuring):
        count = measuring.train(question.seconds)
    single, every = synchroniser.tally.read()
    return single / count / world.Get_size(), every / count


class _Measuring:
    """Measures with one built model.

    Args:
        question: what is asked.
        world: communicator of all ranks.
        trainee: the model.
    """

    def __init__(self, question: Question, world: MPI.Comm, trainee: Trainee) -> None:
        self._question, self._world, self._trainee = question, world, trainee
        spec = question.spec
        # Nothing is kept: each pass reads from storage, as the first epoch does.
        self._reader = DatasetReader(spec.train, trainee.columns, spec.transforms, 0)

    def close(self) -> None:
        self._reader.close()

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of what is trained, and of all real numbers of the model."""
        trained = whole = 0
        variables = self._trainee.variables
        for name, variable in variables.named.items():
            value = np.asarray(variables.view(variable))
            if not name.startswith("model/") or value.dtype.kind not in "fV":
                continue
            whole += value.nbytes
            trained += value.nbytes if variables.is_trained(variable) else 0
        return trained, whole

    def first_step(self) -> float:
        """Return the seconds of the first step."""
        size = self._question.spec.fit.batch_size
        with contextlib.closing(self._epochs(size).steps_from(0)) as steps:
            step = next(steps)
        began = time.perf_counter()
        self._trainee.train_step(step, NOTHING, False)
        return time.perf_counter() - began

    def steps(self, size: int) -> StepFigures | None:
        """Return what steps of a batch size take; ``None`` if the rows do not fill one."""
        kept = self._kept(size)
        if not kept:
            return None
        trainee, endless = self._trainee, itertools.cycle(kept)

        def step_once() -> None:
            trainee.train_step(next(endless), NOTHING, False)

        step_once()  # of another size, it may be compiled
        took = _seconds_of(step_once, _WARM_STEPS)
        count = _agreed(self._world, self._question.seconds / took)
        exchanged, cpu = trainee.exchange_seconds(), time.process_time()
        moments = [time.perf_counter()]
        for step in itertools.islice(endless, count):
            trainee.train_step(step, NOTHING, False)
            moments.append(time.perf_counter())
            report_progress()
        cpu = time.process_time() - cpu
        each = np.diff(moments)
        usual = np.sort(each)[: max(1, len(each) - len(each) // 20)]
        after = trainee.exchange_seconds()
        return StepFigures(
            seconds=float(each.mean()),
            spread=float(usual.std()),
            cpu_seconds=cpu / count,
            exchange=None if after is None or exchanged is None else (after - exchanged) / count,
        )

    def train(self, seconds: float) -> int:
        """Train for some seconds on full batches of all ranks; return the steps.

        What the first step takes to be built does not count, and few slow steps, whose mean says
        little, get ten times the time.

        Raises:
            DataError: the rows do not fill one.
        """
        world = self._world
        epochs = self._epochs(self._question.spec.fit.batch_size)
        began, count = time.perf_counter(), 0

        def over() -> bool:
            spent = time.perf_counter() - began
            enough = spent > (seconds if count >= _NOISE_STEPS else 10 * seconds)
            return bool(world.bcast(count and enough))

        for number in itertools.count():
            with contextlib.closing(epochs.steps_from(number)) as steps:
                for step in steps:
                    # The first pass is gone through as far as time allows, by all ranks alike.
                    if not step.equal or over():
                        break
                    self._trainee.train_step(step, NOTHING, False)
                    report_progress()
                    count += 1
                    if count == 1:
                        began = time.perf_counter()
            if not count:
                raise DataError(f"the rows do not fill a step of {world.Get_size()} ranks")
            if over():
                return count
        raise AssertionError("passes do not end")

    def reading(self) -> tuple[float, float]:
        """Return the rows per second that are read at first, and the processor seconds of a row."""
        question, spec = self._question, self._question.spec
        keeping = spec.train.size if question.kept else 0
        reader = DatasetReader(spec.train, self._trainee.columns, spec.transforms, keeping)
        with contextlib.closing(reader):
            epochs = self._epochs(spec.fit.batch_size, reader)
            self._world.Barrier()
            return read_at_first(epochs, question.seconds, whole=question.kept)

    def _kept(self, size: int) -> list[Step]:
        """Return steps in which every rank has so many rows."""
        kept: list[Step] = []
        room = _BATCHES_BYTES
        with contextlib.closing(self._epochs(size).steps_from(0)) as steps:
            for step in itertools.islice(steps, _BATCHES):
                if not step.equal:
                    break
                # What is read are parts of chunks, which would be kept whole.
                arrays = {name: values.copy() for name, values in step.batch.arrays.items()}
                kept.append(replace(step, batch=replace(step.batch, arrays=arrays)))
                room -= sum(values.nbytes for values in arrays.values())
                if room < 0:
                    break
        count = _least(self._world, len(kept))
        return kept[:count]

    def _epochs(self, size: int, reader: DatasetReader | None = None) -> Epochs:
        spec, world = self._question.spec, self._world
        ranks = world.Get_size()
        fit = replace(spec.fit, batch_size=size, steps_per_epoch=None)
        return Epochs(
            reader or self._reader,
            spec.train,
            fit,
            size * ranks,
            spec.window_bytes,
            world.Get_rank(),
            ranks,
        )


def _sum_seconds(world: MPI.Comm, collectives: Collectives, size: int) -> float:
    """Return the seconds of a sum of so many bytes of each rank, the mean of several."""
    numbers = np.zeros(max(1, size // 4), np.float32)

    def add_up() -> None:
        collectives.sum([numbers], f"plan.{size}")

    took = _seconds_of(add_up, 2)
    count = _agreed(world, 0.3 / took)
    world.Barrier()
    seconds = _seconds_of(add_up, count)
    report_progress()
    return seconds


def _latency(world: MPI.Comm) -> float:
    """Return the seconds of MPI's own sum of one number; 0 of one rank."""
    if world.Get_size() == 1:
        return 0.0
    own, summed = np.zeros(1), np.zeros(1)
    _seconds_of(lambda: world.Allreduce(own, summed), 10)
    return _seconds_of(lambda: world.Allreduce(own, summed), 200)


def _seconds_of(act: Callable[[], Any], times: int) -> float:
    """Return the seconds of one of so many calls, the mean."""
    began = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - began) / times


def _agreed(world: MPI.Comm, wanted: float) -> int:
    """Return how often all ranks do something: what rank 0 wants, within bounds."""
    return int(world.bcast(min(max(int(wanted), 5), _MOST_STEPS)))


def _least(world: MPI.Comm, own: int) -> int:
    return int(min(world.allgather(own)))
