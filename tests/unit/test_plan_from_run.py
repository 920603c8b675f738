"""What a run that has finished tells for a plan, and what it cannot tell."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import InvalidInputError
from horovod_spark_runner.checkpoint.files import CheckpointInfo, save_checkpoint
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.formatting import duration
from horovod_spark_runner.frameworks import KERAS
from horovod_spark_runner.planning.from_run import measure_from_run
from horovod_spark_runner.planning.measurement import Measurement
from horovod_spark_runner.planning.model import ETHERNET_LATENCY, Cluster, Link, predict
from horovod_spark_runner.planning.plan import _measured_lines
from horovod_spark_runner.sync.allreduce import BUCKET_BYTES
from horovod_spark_runner.training.time_breakdown import KINDS, WHOLE, Kind, record
from tests.report.runs import leave_run

RANKS, STEPS = 4, math.ceil(5000 / (4 * 32))
TRAINED, WHOLE_MODEL = 4_000_000, 10_000_000


def account(
    *,
    exchange: float = 0.9,
    build: float = 0.0,
    waited: float = 0.0,
    steps: int = STEPS,
    trained: int = TRAINED,
) -> dict[str, Any]:
    table = np.zeros((RANKS, len(KINDS)))
    seconds = {Kind.BUILD: build, Kind.COMPUTE: 0.05 * steps, Kind.EXCHANGE: exchange}
    seconds[Kind.DATA] = waited
    for kind, each in seconds.items():
        table[:, KINDS.index(kind)] = each
    # Each of the ranks sends 2·(N-1)/N times its gradients.
    told = {WHOLE: 2 * (RANKS - 1) * trained * steps}
    return {"workers": RANKS, **told, **record(table)}


def told_by(
    place: Path,
    accounts: list[dict[str, Any]],
    *,
    hosts: int = 1,
    compression: object = "none",
) -> Measurement:
    sync = {"sync": "allreduce", "compression": compression}
    directory = leave_run(place, len(accounts), sync=sync)
    directory.write_metrics([{"loss": 1.0}] * len(accounts), accounts)
    placement = [
        {"rank": i, "host": f"node-{i % hosts}", "slot": i, "gpus": []} for i in range(RANKS)
    ]
    directory.add_call({**directory.read_calls()[-1], "placement": placement})
    weights = np.zeros(WHOLE_MODEL // 4, np.float32)
    shown = ("model/0", "kernel", list(weights.shape), "float32")
    info = CheckpointInfo(1, 1, [], "data", [shown], KERAS)
    save_checkpoint(directory, info, {"variables.npz": {"a": weights[:1]}})
    return measure_from_run(RunDirectory(str(place)), 2e9)


def test_what_steps_exchanged_is_told_by_the_accounts(tmp_path: Path) -> None:
    """Not by the checkpoint, which holds frozen layers as well."""
    work = told_by(tmp_path / "run", [account(), account()]).workload
    assert work.gradient_bytes == TRAINED


def test_an_epoch_that_a_call_went_on_with_tells_nothing(tmp_path: Path) -> None:
    """Of the third, a resumed attempt trained the second half only."""
    half = account(build=4.0, steps=STEPS // 2)
    found = told_by(tmp_path / "run", [account(build=3.0), account(), half, account()])
    (step,) = found.workload.steps.values()
    assert step.seconds == pytest.approx(0.05)
    assert found.source.endswith("epochs: 2")
    once = [account(build=3.0)]
    with pytest.raises(InvalidInputError, match=r"time.*epochs.*\b1"):
        told_by(tmp_path / "once", once)


def test_a_short_wait_for_rows_makes_no_slow_reader(tmp_path: Path) -> None:
    """The reader of a run that exchanged half of the time is no slower for that."""
    here = Cluster(RANKS, RANKS, Link(0.0, 1e15))

    def seconds_of_one(name: str, waited: float) -> float:
        accounts = [account(exchange=0.05 * STEPS, waited=waited * STEPS)] * 2
        return predict(told_by(tmp_path / name, accounts).workload, here, 1).step_seconds

    assert seconds_of_one("short", 0.003) == pytest.approx(0.053)
    # One that all ranks have waited for gives no rows faster to one.
    assert seconds_of_one("long", 0.05) == pytest.approx(0.15)


@pytest.mark.parametrize("compression", ["bf16", {"way": "topk", "ratio": 0.01}])
def test_compressed_exchanges_tell_nothing_of_others(tmp_path: Path, compression: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"Allreduce\(compression=.*plan_training"):
        told_by(tmp_path / "run", [account(), account()], compression=compression)


def test_exchanges_between_hosts_tell_a_bandwidth(tmp_path: Path) -> None:
    latency = 2 * (RANKS - 1) * ETHERNET_LATENCY
    moved = 2 * (RANKS - 1) / RANKS * BUCKET_BYTES
    exchange = STEPS * (latency + moved / 100e6)
    both = [account(exchange=exchange, trained=BUCKET_BYTES)] * 2
    found = told_by(tmp_path / "run", both, hosts=2)
    assert found.between is not None
    assert found.between.bandwidth == pytest.approx(100e6, rel=1e-3)
    several = [account(exchange=exchange, trained=BUCKET_BYTES + 4)] * 2
    with pytest.raises(InvalidInputError, match="exchange.*backward"):
        told_by(tmp_path / "several", several, hosts=2)
    short = [account(exchange=0.9 * STEPS * latency, trained=BUCKET_BYTES)] * 2
    with pytest.raises(InvalidInputError, match=r"\b6 messages.*0.05 ms"):
        told_by(tmp_path / "short", short, hosts=2)
    assert "50 µs, 0.8 Gbit/s" in "\n".join(_measured_lines(found))
    one = told_by(tmp_path / "one", short)
    assert one.between is None
    lines = "\n".join(_measured_lines(one))
    assert re.search(f"exchange.*host.*{duration(0.9 * latency)}", lines)
