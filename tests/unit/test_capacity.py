"""Slots of local masters, as Spark counts them."""

from __future__ import annotations

import pytest

from horovod_spark_runner.launch.capacity import local_capacity


@pytest.mark.parametrize(
    ("master", "cpus", "slots"),
    [
        ("local", 1, 1),
        ("local[4]", 1, 4),
        ("local[4]", 2, 2),
        ("local[*]", 1, 6),
        ("local[3, 2]", 1, 3),
        ("local[*,4]", 4, 1),
        ("local-cluster[2,3,1024]", 1, 6),
        ("local-cluster[2, 3, 1024]", 2, 2),
    ],
)
def test_local_masters(master: str, cpus: int, slots: int) -> None:
    capacity = local_capacity(master, cpus, machine_cpus=6)
    assert capacity is not None
    assert capacity.slots == slots
    assert master in capacity.reason


@pytest.mark.parametrize("master", ["spark://h:7077", "yarn", "k8s://https://h", ""])
def test_real_clusters_have_to_be_asked(master: str) -> None:
    assert local_capacity(master, 1, 6) is None
