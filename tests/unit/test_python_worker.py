"""What a Python worker of Spark's keeps between tasks."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref

import pytest

from horovod_spark_runner.cluster.spark.tasks import exclude_from_gc

pytestmark = pytest.mark.thorough


class Ring:
    """As models do, it holds on to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_left_out_of_collections_is_freed_once_something_was_dropped() -> None:
    before = gc.get_freeze_count()
    try:
        ring = Ring()
        known = weakref.ref(ring)
        exclude_from_gc(dropped=False)
        assert gc.get_freeze_count() > before
        del ring
        gc.collect()
        assert known() is not None  # what this test is about: it was not looked at
        exclude_from_gc(dropped=False)
        assert known() is not None
        exclude_from_gc(dropped=True)
        assert known() is None
    finally:
        gc.unfreeze()


# A task of the session has one of the executor's GPUs; workers are used again by other tasks.
TASKS = """
import os, sys
from pyspark import TaskContext
from pyspark.resource import ResourceInformation
from horovod_spark_runner.cluster.spark.tasks import apply_task_limits
for gpus in sys.argv[1:]:
    context = TaskContext._getOrCreate()
    context._cpus = 1
    context._resources = {"gpu": ResourceInformation("gpu", gpus.split(","))} if gpus else {}
    apply_task_limits()
    print("sees", os.environ["CUDA_VISIBLE_DEVICES"] or "none")
"""


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        (["1", "1"], ""),
        (["", ""], ""),
        (["0,1", "1,0"], ""),
        (
            ["0", "1"],
            "GPU 1.*GPU 0",
        ),
        (["", "1"], "GPU 1.*no GPU"),
        (["1", ""], "no GPU.*GPU 1"),
    ],
)
def test_a_worker_that_has_used_one_gpu_does_not_pretend_to_use_another(
    tasks: list[str], told: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TASKS, *tasks], capture_output=True, text=True, check=False
    )
    seen = [f"sees {tasks[0] or 'none'}"]
    assert done.stdout.splitlines() == seen * (1 if told else 2)
    assert re.search(f"EnvironmentProblem: .*{told}", done.stderr) if told else not done.returncode
