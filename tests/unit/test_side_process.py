"""Calls in forks and in a side process."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest

from horovod_spark_runner.cluster.worker import side_process
from horovod_spark_runner.cluster.worker.side_process import call_in_fork
from horovod_spark_runner.errors import ModelError

seen: list[int] = []


def note(number: int) -> tuple[int, int]:
    seen.append(number)
    return os.getpid(), len(seen)


def refuse(number: int) -> None:
    raise ModelError(f"not {number}")


def fail(number: int) -> None:
    raise LookupError(f"no {number}")


def test_a_call_in_a_fork_leaves_no_trace() -> None:
    pid, count = call_in_fork(lambda: note(1), 30.0)
    assert pid != os.getpid()
    assert (count, seen) == (1, [])


def test_a_fork_without_a_result_is_ended() -> None:
    with pytest.raises(ChildProcessError, match=r"0 s"):
        call_in_fork(lambda: time.sleep(60), 0.2)
    with pytest.raises(ChildProcessError, match="without a result"):
        call_in_fork(lambda: os._exit(1), 30.0)


@pytest.mark.parametrize("function", [note, refuse, fail])
def test_a_side_process_makes_one_call_with_the_arguments_of_the_rank(
    function: object, tmp_path: Path
) -> None:
    payload = tmp_path / "payload"
    side_process.start(payload)
    payload.write_bytes(pickle.dumps((print, (7,), {})))
    process = side_process.take()
    assert process is not None
    assert side_process.take() is None
    if function is note:
        assert process.call(note, seconds=30.0)[1] == 1
    elif function is refuse:
        with pytest.raises(ModelError, match="not 7"):
            process.call(refuse, seconds=30.0)
    else:
        with pytest.raises(RuntimeError, match="LookupError: .*no 7"):
            process.call(fail, seconds=30.0)
    with pytest.raises(ChildProcessError):
        os.waitpid(process._pid, os.WNOHANG)
    assert seen == []
