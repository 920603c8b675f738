"""HorovodRunner: real ranks, real collectives, real failures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import (
    HorovodRunner,
    InvalidInputError,
    MpiOptions,
    RankFailedError,
    RestartOptions,
    RunFailedError,
)
from horovod_spark_runner.cluster.driver.result import PHASES
from horovod_spark_runner.cluster.protocol import rendezvous
from horovod_spark_runner.cluster.protocol.rendezvous import Rendezvous
from horovod_spark_runner.config.launch import AllreduceAlgorithm
from tests.leftovers import await_nothing_left, own_task

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def describe(value: float) -> dict[str, Any]:
    """Return what this rank sees of the world, and the sum of all ranks' values."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    total = hvd.allreduce(tf.constant(value * hvd.rank()), op=hvd.Sum)
    print(f"grüße von {hvd.rank()}")
    return {
        "rank": hvd.rank(),
        "local_rank": hvd.local_rank(),
        "cross_rank": hvd.cross_rank(),
        "size": hvd.size(),
        "sum": float(total),
        "task": own_task(),
        "cuda": os.environ["CUDA_VISIBLE_DEVICES"],
        "mine": os.environ.get("MY_SETTING"),
    }


def train_with_ddp() -> tuple[float, str]:
    """Train as a function for ``TorchDistributor`` does; return the weight, and its variables."""
    import torch
    from torch import distributed, nn

    distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model(torch.tensor([[1.0 + distributed.get_rank()]])).sum().backward()
    optimizer.step()
    distributed.destroy_process_group()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return float(model.module.weight), "/".join(os.environ[name] for name in names)


def test_a_function_of_torch_distributed_runs_as_it_is(spark: Any) -> None:
    runner = HorovodRunner(2, env={"RANK": "7"})  # of an outer job
    # The mean of the gradients 1 and 2.
    assert runner.run(train_with_ddp).results == ((-0.75, "0/2/0/2"), (-0.75, "1/2/1/2"))


@pytest.mark.thorough
@pytest.mark.parametrize("world", [1, 3])
def test_a_function_on_every_rank(
    spark: Any, world: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    runner = HorovodRunner(world, env={"MY_SETTING": "x"})
    run = runner.run(describe, value=2.0)
    assert [r["rank"] for r in run.results] == list(range(world))
    assert [r["local_rank"] for r in run.results] == list(range(world))
    assert {(r["size"], r["cross_rank"], r["mine"], r["cuda"]) for r in run.results} == {
        (world, 0, "x", "")
    }
    assert {r["sum"] for r in run.results} == {2.0 * sum(range(world))}
    assert run.result is run.results[0]
    assert [p.rank for p in run.placement] == list(range(world))
    assert {"mpirun", "import", "mpi_init"} <= run.timings.keys()
    # The slots have learnt their ranks from the driver.
    assert "all_gather" not in run.timings
    phases = [run.timings[phase] for phase in ("check", "slots", *PHASES)]
    assert sum(phases) == pytest.approx(run.timings["total"], rel=0.03)
    # Each rank belongs to a Spark task of its own.
    assert len({r["task"] for r in run.results}) == world
    assert dict(os.environ) == before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    output = capfd.readouterr().err
    for rank in range(world):
        assert f"[{rank}/{os.uname().nodename}] grüße von {rank}" in output


def test_as_many_ranks_as_there_are_slots(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(HorovodRunner().run(max, 1, 2).results) == 4
    told = r"num_workers=4\b.*master local\[?4\]?.*\b4 cores.*\b1\b"
    assert len(re.findall(told, capfd.readouterr().err)) == 1


def fail_on(rank: int, how: str) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    if hvd.rank() == rank:
        if how == "raise":
            raise KeyError("the culprit")
        if how == "exit":
            raise SystemExit(3)
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        hvd.allreduce(tf.constant(1.0), name="x")
        time.sleep(0.1)


def test_the_first_exception_is_raised_with_its_traceback(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailedError) as caught:
        HorovodRunner(3, log_dir=str(tmp_path)).run(fail_on, 1, "raise")
    shown = capfd.readouterr().err
    assert "MPI_ERRORS_ARE_FATAL" not in shown
    assert "MPI_ABORT" not in shown
    logs = [path.read_text() for path in tmp_path.iterdir()]
    assert any("MPI_ERRORS_ARE_FATAL" in log for log in logs)
    error = caught.value
    assert (error.rank, error.exception_type) == (1, "KeyError")
    assert isinstance(error.__cause__, KeyError)
    first, line = error.remote_traceback.splitlines()[1:3]
    assert re.search(f'"{re.escape(__file__)}".* in fail_on', first)  # none of ours before it
    assert line.strip() == 'raise KeyError("the culprit")'
    text = str(error)
    assert re.match(f"rank 1 on {os.uname().nodename} .*KeyError: 'the culprit'", text)
    assert "rank 0" in text
    assert "rank 2" in text


def bring(what: str) -> Any:
    """Return or raise what gives trouble on its way to the driver."""
    folder = os.environ["TMPDIR"]
    Path(folder, "only_on_ranks.py").write_text(
        "class Thing:\n    pass\nclass Trouble(Exception):\n    pass\n"
    )
    sys.path.insert(0, folder)
    import only_on_ranks

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    if what == "result":
        return only_on_ranks.Thing()
    if what == "exception":
        raise only_on_ranks.Trouble("on the rank")
    if what == "mute":
        raise Mute
    if what == "long":
        raise ValueError("x" * 3_000_000)
    sys.stdout.close()
    sys.stderr = None
    return what


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("exception", "rank 0 .*Trouble: on the rank"),
        ("mute", "rank 0 .*Mute: .*RuntimeError"),
        ("long", "rank 0 .*ValueError: x+ … .*characters"),
        ("result", "rank 0 .*driver.*only_on_ranks"),
    ],
)
def test_what_cannot_be_loaded_or_shown_on_the_driver(spark: Any, what: str, told: str) -> None:
    with pytest.raises(RunFailedError, match=told) as caught:
        HorovodRunner(1, stream_logs=False).run(bring, what)
    assert len(str(caught.value)) < 100_000


def look_for_frameworks() -> bool:
    """Do as a function does that takes what there is; tell whether Horovod has PyTorch."""
    import horovod.torch

    return hasattr(horovod.torch, "init")


@pytest.mark.thorough
def test_a_function_may_ask_for_a_framework_that_horovod_lacks(spark: Any) -> None:
    found = HorovodRunner(1, stream_logs=False).run(look_for_frameworks)
    assert found.result == (importlib.util.find_spec("torch") is not None)


def test_a_function_may_close_its_output(spark: Any) -> None:
    assert HorovodRunner(1, stream_logs=False).run(bring, "closed").results == ("closed",)


@pytest.mark.thorough
def test_a_killed_rank_is_named_with_its_last_lines(spark: Any) -> None:
    with pytest.raises(RankFailedError, match="signal 9.*SIGKILL") as caught:
        HorovodRunner(2, stream_logs=False).run(fail_on, 0, "kill")
    assert caught.value.rank == 0
    assert "last words" in str(caught.value)


def test_a_rank_that_exits_is_a_failed_rank(spark: Any) -> None:
    with pytest.raises(RankFailedError, match="rank 1 .* SystemExit: 3"):
        HorovodRunner(2, stream_logs=False).run(fail_on, 1, "exit")


def exit_with(code: object) -> None:
    import horovod.tensorflow as hvd

    hvd.init()
    hvd.allgather_object(hvd.rank())
    sys.exit(code)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [None, 0])
def test_a_program_may_exit_as_a_script_that_succeeds(spark: Any, code: object) -> None:
    assert HorovodRunner(2, stream_logs=False).run(exit_with, code).results == (None, None)


def run_script(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def test_a_script_is_a_program(spark: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(__name__)\n"
        "sys.exit(0)\n"
    )
    with pytest.raises(InvalidInputError, match="train.py.*run_path"):
        HorovodRunner(2).run(str(script), str(tmp_path))  # type: ignore[arg-type]
    HorovodRunner(2, stream_logs=False).run(run_script, str(script), str(tmp_path))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["__main__", "__main__"]


@pytest.mark.parametrize("code", ["", "no data"])
def test_a_program_that_exits_with_a_message_has_failed(spark: Any, code: object) -> None:
    with pytest.raises(RankFailedError, match="SystemExit"):
        HorovodRunner(2, stream_logs=False).run(exit_with, code)


def test_a_result_that_cannot_be_pickled(spark: Any) -> None:
    with pytest.raises(RankFailedError, match=r"\block\b.*pickle"):
        HorovodRunner(1, stream_logs=False).run(threading.Lock)


def test_nothing_is_left_of_runs_that_failed_or_not(spark: Any) -> None:
    HorovodRunner(2, stream_logs=False).run(max, 1, 2)
    with pytest.raises(RankFailedError):
        HorovodRunner(2, stream_logs=False).run(fail_on, 0, "kill")
    await_nothing_left()


@pytest.mark.thorough
def test_large_arguments_and_results(spark: Any) -> None:
    data = os.urandom(20 * 1024 * 1024)
    run = HorovodRunner(2, stream_logs=False).run(lambda value: value[::-1], data)
    assert run.results[1] == data[::-1]


def test_runs_from_another_thread(spark: Any) -> None:
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.append(
            HorovodRunner(2, spark=spark, stream_logs=False).run(max, 3, 2)
        )
    )
    thread.start()
    thread.join(120)
    assert results[0].results == (3, 3)


def sum_in_some_order() -> list[float]:
    """Add up what gives another sum in another order; return all of its elements."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    own = (1e8, -1e8, 1.0)[hvd.rank()]  # 1e8 and 1 is 1e8, in single precision
    return list(hvd.allreduce(tf.fill([300], own), op=hvd.Sum).numpy().tolist())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "ones"),
    [
        # A ring adds up each rank's third from another rank on: (1e8 - 1e8) + 1, but 0 otherwise.
        ("ring", {100}),
        ("segmented_ring", {100}),
        # So few bytes are added up in the same order everywhere.
        ("auto", {0, 300}),
    ],
)
def test_the_ring_can_be_forced(spark: Any, algorithm: AllreduceAlgorithm, ones: set[int]) -> None:
    options = MpiOptions(algorithm=algorithm)
    run = HorovodRunner(3, mpi=options, stream_logs=False).run(sum_in_some_order)
    assert run.results[0] == run.results[1] == run.results[2]
    assert run.result.count(1.0) in ones
    assert run.result.count(0.0) == 300 - run.result.count(1.0)


def test_logs_that_cannot_be_kept_are_told_of(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "logs"
    run = HorovodRunner(1, log_dir=str(folder), stream_logs=False).run(max, 1, 2)
    assert run.results == (2,)
    assert str(folder) in caplog.text


@pytest.mark.thorough
def test_slots_find_each_other_through_spark_where_the_driver_cannot_help(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "GATHER_AFTER", 0.5)
    monkeypatch.setattr(Rendezvous, "_arrange", lambda self: None)
    run = HorovodRunner(2, stream_logs=False).run(describe, value=1.0)
    assert [r["rank"] for r in run.results] == [0, 1]
    assert {r["sum"] for r in run.results} == {1.0}
    assert run.timings["all_gather"] > 0


def count_to_four(folder: str, raised: bool) -> list[int]:
    """Return the attempts that have counted, by one rank; it dies, or raises, on its way."""
    from mpi4py import MPI

    from horovod_spark_runner import attempt

    place = Path(folder, "counted")
    for _ in range(4):
        counted = json.loads(place.read_text()) if place.exists() else []
        if len(counted) == 4:
            break
        if len(counted) == 2 and attempt() == 1 and MPI.COMM_WORLD.Get_rank() == 1:
            if raised:
                raise ValueError("its own")
            os.kill(os.getpid(), signal.SIGKILL)
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.Get_rank() == 0:
            place.write_text(json.dumps([*counted, attempt()]))
        MPI.COMM_WORLD.Barrier()
    return json.loads(place.read_text())  # type: ignore[no-any-return]


def test_a_function_is_called_again_after_a_rank_was_killed(spark: Any, tmp_path: Path) -> None:
    once = RestartOptions(max_restarts=1, backoff_seconds=0.0)
    runner = HorovodRunner(2, restarts=once)
    assert runner.run(count_to_four, str(tmp_path), raised=False).results == ([1, 1, 2, 2],) * 2
    (tmp_path / "counted").unlink()
    with pytest.raises(RankFailedError, match="ValueError: its own") as raised:
        runner.run(count_to_four, str(tmp_path), raised=True)
    assert "Attempts" not in str(raised.value)  # its own errors would come again
    with pytest.raises(InvalidInputError, match="min_workers=3"):
        HorovodRunner(2, restarts=RestartOptions(min_workers=3)).run(count_to_four, "", True)
