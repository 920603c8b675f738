"""Ranks forked from a process that has imported the framework: fresh, and gone when they should."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from horovod_spark_runner import HorovodRunner, LaunchOptions, RankFailedError, run_training
from horovod_spark_runner.cluster.spark.tasks import apply_task_limits
from tests.leftovers import await_nothing_left, own_task

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def parents() -> tuple[int, str, int]:
    """Return this rank's parent, that one's name, and the Spark task's process."""
    import tensorflow as tf

    assert tf.__version__
    return os.getppid(), psutil.Process(os.getppid()).name(), own_task()


def run(
    function: Callable[..., Any], *args: Any, ranks: int = 1, **options: Any
) -> tuple[Any, ...]:
    return HorovodRunner(ranks, stream_logs=False, **options).run(function, *args).results


def await_ready() -> None:
    """Wait for a process that lends ranks: on a busy machine one may still be starting."""
    deadline = time.monotonic() + 120
    while run(parents)[0][1] != "horovod-ready":
        assert time.monotonic() < deadline


def await_end(pid: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.1)


def test_all_ranks_and_the_next_run_come_from_one_process(spark: Any) -> None:
    first, second = run(parents, ranks=2), run(parents, ranks=2)
    assert {name for _, name, _ in first + second} == {"horovod-ready"}
    assert len({pid for pid, _, _ in first + second}) == 1
    assert len({task for _, _, task in first}) == 2


def load_framework(rows: Iterable[int]) -> Iterator[int]:
    """Do in Spark's Python worker what an inference does there."""
    apply_task_limits()
    import tensorflow as tf

    assert tf.__version__
    for _ in rows:
        yield os.getpid()


def look_around() -> tuple[int, int, dict[str, str]]:
    before = dict(os.environ)
    import tensorflow as tf

    assert tf.__version__
    return os.getppid(), own_task(), before


@pytest.mark.thorough
def test_an_inference_in_between_changes_nothing(spark: Any) -> None:
    """Its workers have loaded a framework, which sets variables of its own."""
    before = run(look_around, ranks=2, env={"HSR_TEST": "inference"})
    (pid,) = spark.sparkContext.range(1, numSlices=1).mapPartitions(load_framework).collect()
    after = run(look_around, ranks=4, env={"HSR_TEST": "inference"})
    assert pid in {task for _, task, _ in after}, "one of the slots is in that worker"
    assert len({parent for parent, _, _ in (*before, *after)}) == 1
    names = {frozenset(environment) for _, _, environment in (*before, *after)}
    threads = {environment["TF_NUM_INTEROP_THREADS"] for _, _, environment in (*before, *after)}
    assert len(names) == len(threads) == 1


def make_model() -> Any:
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.thorough
def test_a_training_has_begun_to_import_while_its_data_are_prepared(
    spark: Any, tmp_path: Path
) -> None:
    rows = spark.createDataFrame([([float(i)], float(i)) for i in range(8)], ["x", "y"])
    trained = run_training(
        rows,
        make_model,
        feature_cols=["x"],
        label_cols=["y"],
        num_workers=2,
        epochs=1,
        batch_size=2,
        run_dir=str(tmp_path),
        launch=LaunchOptions(env={"HSR_TEST_OF_ITS_OWN": "no process of an earlier test has this"}),
        stream_logs=False,
    )
    # When the ranks were asked for, the import was under way.
    assert trained.summary.timings["import"] < 0.5


def leave_and_look() -> dict[str, Any]:
    """Return what an earlier rank left here, and leave it."""
    import json

    import keras

    import tests.mpi.test_ready as own

    found = {
        "module": getattr(json, "left", None),
        "own module": getattr(own, "left", None),
        "environment": os.environ.get("LEFT_BY_A_RANK"),
        "precision": keras.config.floatx(),
        "folder": Path.cwd() == Path("/"),
        "argument": sys.argv[-1] == "left",
    }
    json.left = own.left = True  # type: ignore[attr-defined]
    os.environ["LEFT_BY_A_RANK"] = "1"
    keras.config.set_floatx("float64")
    os.chdir("/")
    sys.argv.append("left")
    return found


def test_a_rank_finds_nothing_of_an_earlier_one(spark: Any) -> None:
    ranks = run(leave_and_look, ranks=2) + run(leave_and_look, ranks=2)
    for found in ranks:
        assert found == {
            "module": None,
            "own module": None,
            "environment": None,
            "precision": "float32",
            "folder": False,
            "argument": False,
        }


def random_numbers() -> tuple[float, ...]:
    import random

    import keras
    import numpy as np
    import tensorflow as tf

    return (
        random.random(),
        float(np.random.rand()),
        float(tf.random.uniform(())),
        float(keras.random.uniform(())),
    )


def test_ranks_draw_different_random_numbers(spark: Any) -> None:
    drawn = run(random_numbers, ranks=2) + run(random_numbers, ranks=2)
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn)


@pytest.mark.thorough
def test_another_environment_gets_a_process_of_its_own(spark: Any) -> None:
    ((before, _, _),) = run(parents)
    ((other, name, _),) = run(parents, env={"OMP_NUM_THREADS": "2"})
    assert name == "horovod-ready"
    assert other != before
    await_end(before)  # only one waits at a time


@pytest.mark.thorough
def test_it_ends_when_nobody_asks_for_a_while(spark: Any) -> None:
    ((pid, name, _),) = run(parents, worker_idle_timeout=0.5)
    assert name == "horovod-ready"
    await_end(pid)
    ((again, _, _),) = run(parents)
    assert again != pid


@pytest.mark.thorough
def test_none_is_kept_where_none_is_wanted(spark: Any) -> None:
    ((earlier, _, _),) = run(parents)
    result = HorovodRunner(num_workers=1, stream_logs=False, worker_idle_timeout=0).run(parents)
    await_end(earlier)
    ((pid, _, task),) = result.results
    assert pid == task
    assert result.ready_bytes == 0
    # With which MPI ends what it cannot begin: this has begun.
    with pytest.raises(RankFailedError, match="code 14") as caught:
        HorovodRunner(num_workers=1, stream_logs=False, worker_idle_timeout=0).run(os._exit, 14)
    assert not re.search("connection|start|mpirun", str(caught.value).splitlines()[0])


def parents_memory() -> int:
    import tensorflow as tf

    assert tf.__version__
    return psutil.Process(os.getppid()).memory_info().rss


@pytest.mark.thorough
def test_its_memory_is_told(spark: Any) -> None:
    result = HorovodRunner(num_workers=1, stream_logs=False).run(parents_memory)
    assert result.ready_bytes > 100 * 2**20
    assert result.ready_bytes == pytest.approx(result.result, rel=0.1)


def kill_parent() -> None:
    import tensorflow as tf

    assert tf.__version__
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.thorough
def test_a_ready_process_that_is_killed_takes_its_ranks_along(spark: Any) -> None:
    told = "rank 0 on .* signal 9 .*horovod-ready"
    with pytest.raises(RankFailedError, match=told) as caught:
        run(kill_parent)
    assert (caught.value.rank, caught.value.host) == (0, os.uname().nodename)
    await_nothing_left()
    ((_, name, _),) = run(parents)
    assert name == "horovod-ready"


@pytest.mark.thorough
def test_one_that_is_stopped_is_replaced_at_once(spark: Any) -> None:
    ((pid, _, _), *_) = run(parents, ranks=2)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    ranks = run(parents, ranks=2)
    assert all(parent == task for parent, _, task in ranks), "they were started the plain way"
    assert time.monotonic() - began < 120, "it was not waited for"
    await_end(pid)
    ((_, name, _),) = run(parents)
    assert name == "horovod-ready"


def stop_parent_and_exit(note: str) -> None:
    import tensorflow as tf

    assert tf.__version__
    Path(note).write_text(str(os.getppid()))
    os.kill(os.getppid(), signal.SIGSTOP)
    os._exit(3)


@pytest.mark.thorough
def test_a_rank_ends_though_its_ready_process_is_stopped(spark: Any, tmp_path: Path) -> None:
    note = tmp_path / "stopped"
    try:
        # With its own code, not the guess that would be made in the end.
        with pytest.raises(RankFailedError, match="rank 0 .* code 3"):
            run(stop_parent_and_exit, str(note))
        await_nothing_left()
    finally:
        pid = int(note.read_text())
        os.kill(pid, signal.SIGKILL)
        await_end(pid)  # until then the next test's run would still find it


def fork_and(what: str) -> int:
    """Leave a child that holds on to everything this process had open, then end."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    if what == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError("while a child lives")
    return child


def with_framework(function: Callable[[str], Any], how: str) -> Any:
    """Call a function on a rank that was forked: the prefork process is for those of frameworks."""
    import tensorflow as tf

    assert tf.__version__
    assert psutil.Process(os.getppid()).name() == "horovod-ready"
    return function(how)


def without_framework(function: Callable[[str], Any], how: str) -> Any:
    """Call a function on a rank that was started by itself."""
    assert os.getppid() == own_task()
    return function(how)


WAYS = pytest.mark.parametrize(
    "way", [with_framework, without_framework], ids=["forked", "started"]
)


@pytest.mark.thorough
@WAYS
@pytest.mark.parametrize("what", ["return", "be killed", "raise"])
def test_a_child_of_a_rank_does_not_keep_the_run_from_ending(
    spark: Any, what: str, way: Callable[..., Any]
) -> None:
    if way is with_framework:
        await_ready()
    expected = {"be killed": "rank 0 .* signal 9", "raise": "ValueError: while a child"}
    if what == "return":
        (child,) = run(way, fork_and, what)
        await_end(child)
    else:
        with pytest.raises(RankFailedError, match=expected[what]):
            run(way, fork_and, what)
    await_nothing_left()


def fork_and_leave(how: str) -> str:
    """Let a forked child leave the function by itself, as careless code does; wait for it."""
    child = os.fork()
    if child == 0:
        if how == "raise":
            raise ValueError("in the child")
        if how == "exit":
            sys.exit(3)
        return "of the child"
    _, status = os.waitpid(child, 0)
    return f"of the parent, {os.waitstatus_to_exitcode(status)}"


@pytest.mark.thorough
@WAYS
@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("exit", 3)])
def test_a_forked_child_is_no_rank(
    spark: Any, how: str, code: int, way: Callable[..., Any]
) -> None:
    if way is with_framework:
        await_ready()
    assert run(way, fork_and_leave, how, ranks=2) == (f"of the parent, {code}",) * 2
