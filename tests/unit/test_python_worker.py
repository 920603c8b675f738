"""What a Python worker of Spark's keeps between tasks."""

from __future__ import annotations

import gc
import weakref

from horovod_spark_runner.spark.python_worker import spare_from_collection


class Ring:
    """As models do, it holds on to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_left_out_of_collections_is_freed_before_the_next_is() -> None:
    before = gc.get_freeze_count()
    try:
        ring = Ring()
        known = weakref.ref(ring)
        spare_from_collection()
        assert gc.get_freeze_count() > before
        del ring
        gc.collect()
        assert known() is not None  # what this test is about: it was not looked at
        spare_from_collection()
        assert known() is None
    finally:
        gc.unfreeze()
