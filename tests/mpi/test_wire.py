"""What compressed gradients travel by: MPI, in messages of one piece and of many."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import HorovodRunner
from horovod_spark_runner.sync.synchroniser import bytes_of_sum

LONG = 133


def arrays(rank: int) -> dict[str, Any]:
    """Return what a rank sends: matrices in both orders, and flat arrays of lengths of its own."""
    stream = np.random.default_rng(rank)
    matrix = stream.integers(-9, 9, (7, 19)).astype(np.float32)
    lengths = [17, 0, LONG]
    return {
        "rows": matrix,
        "columns": np.asfortranarray(matrix),
        "number": np.array(3.0 + rank),
        "flat": stream.standard_normal(lengths[rank]),
        "none": np.empty(0, np.uint16),
        "parts": [stream.integers(0, 99, length).astype(np.uint16) for length in (LONG, 0, 17)],
    }


def exchange(limit: int) -> tuple[dict[str, Any], float]:
    from horovod_spark_runner.sync import mpi

    mpi._MOST_ELEMENTS = mpi._MOST_BYTES = limit
    wire = mpi.MpiWire()
    own = arrays(wire.rank)
    sums = {name: wire.sum(own[name]) for name in ("rows", "columns", "number")}
    gathered = {name: wire.gather(own[name]) for name in ("flat", "none")}
    return {**sums, **gathered, "parts": wire.swap(own["parts"])}, wire.sent


@pytest.mark.mpi
@pytest.mark.spark
@pytest.mark.parametrize("limit", [1 << 28, 16])
def test_what_is_sent_arrives_whole_in_one_piece_or_many(spark: Any, limit: int) -> None:
    run = HorovodRunner(3).run(exchange, limit)
    sent = [arrays(rank) for rank in range(3)]
    for rank, (found, count) in enumerate(run.results):
        for name in ("rows", "columns", "number"):
            np.testing.assert_array_equal(found[name], sum(own[name] for own in sent))
        for name in ("flat", "none"):
            for ours, own in zip(found[name], sent, strict=True):
                np.testing.assert_array_equal(ours, own[name])
                assert ours.dtype == own[name].dtype
        for ours, own in zip(found["parts"], sent, strict=True):
            np.testing.assert_array_equal(ours, own["parts"][rank])
        own = sent[rank]
        summed = sum(bytes_of_sum(own[name].nbytes, 3) for name in ("rows", "columns", "number"))
        gathered = sum(2 * (own[name].nbytes + 8) for name in ("flat", "none"))
        swapped = sum(part.nbytes for to, part in enumerate(own["parts"]) if to != rank)
        assert count == pytest.approx(summed + gathered + swapped)


DEVICES = [("0", "0", True), ("0", "1", False), ("", "", False), ("GPU-1,GPU-2", "GPU-1", True)]


def sum_on_devices() -> list[tuple[bool, list[float], int]]:
    """Return, for each pair of `DEVICES`, if it is shared, and a sum's value and copies to host."""
    import horovod.torch as hvd
    import torch
    from mpi4py import MPI

    from horovod_spark_runner.engines.torch import exchange, trainee

    copies = []
    to_host = torch.Tensor.cpu

    def copy(tensor: Any) -> Any:
        copies.append(1)
        return to_host(tensor)

    torch.Tensor.cpu = copy  # type: ignore[assignment]
    found = []
    for case in DEVICES:
        copies.clear()
        os.environ["CUDA_VISIBLE_DEVICES"] = str(case[MPI.COMM_WORLD.Get_rank()])
        trainee.begin(0)
        (total,) = exchange.TensorCollectives().sum([torch.tensor([hvd.rank() + 1.0])], "some")
        found.append((exchange.TensorCollectives.through_host, total.tolist(), len(copies)))
    return found


@pytest.mark.mpi
@pytest.mark.spark
def test_ranks_that_share_a_gpu_sum_through_the_host(spark: Any) -> None:
    for found in HorovodRunner(2).run(sum_on_devices).results:
        assert found == [(shared, [3.0], int(shared)) for _, _, shared in DEVICES]


def test_an_mpi_of_one_thread_is_refused(tmp_path: Path) -> None:
    code = (
        "from horovod_spark_runner.sync.mpi import MpiWire\n"
        "from horovod_spark_runner import EnvironmentProblem\n"
        "try: MpiWire()\n"
        "except EnvironmentProblem as error: print(error)\n"
    )
    # A rank without mpirun leaves a folder behind.
    env = {**os.environ, "MPI4PY_RC_THREAD_LEVEL": "serialized", "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert re.search("MPI_THREAD_MULTIPLE.*MPI4PY_RC_THREAD_LEVEL", run.stdout)
