"""Data that several trainings share: prepared once, kept for the last, then deleted."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.prepare.datasets import Prepared
from horovod_spark_runner.data.prepare.folds import SharedData
from horovod_spark_runner.errors import DataError


class Store:
    """Counts what is prepared and cleaned up."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.prepared = self.cleaned = 0

    @contextlib.contextmanager
    def prepare(self) -> Iterator[dict[str | None, Prepared]]:
        if self.failures:
            self.failures -= 1
            raise DataError("a null")
        self.prepared += 1
        time.sleep(0.2)
        yield {None: Prepared(Manifest("", (), (), (), ""), None, reused=False)}
        self.cleaned += 1


def test_threads_wait_for_the_first_and_the_last_cleans_up() -> None:
    store, seen = Store(), []
    shared = SharedData(store.prepare, 3)

    def train() -> None:
        with shared.use(None) as data:
            assert store.cleaned == 0
            seen.append(data.reused)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (store.prepared, store.cleaned) == (1, 1)
    assert sorted(seen) == [False, True, True]


def test_what_a_training_raises_leaves_the_data_to_the_others() -> None:
    store = Store()
    shared = SharedData(store.prepare, 2)
    with pytest.raises(KeyError), shared.use(None):
        raise KeyError("of the training")
    assert store.cleaned == 0
    with shared.use(None) as data:
        assert data.reused
    assert (store.prepared, store.cleaned) == (1, 1)


def test_data_that_cannot_be_prepared_are_tried_again_by_the_next() -> None:
    store = Store(failures=1)
    shared = SharedData(store.prepare, 2)
    with pytest.raises(DataError, match="a null"), shared.use(None):
        pass
    with shared.use(None):
        pass
    assert (store.prepared, store.cleaned) == (1, 1)


def test_they_go_with_trainings_that_are_given_up() -> None:
    store = Store()
    shared = SharedData(store.prepare, 5)
    with shared.use(None):
        pass
    assert store.cleaned == 0
    del shared
    gc.collect()
    assert store.cleaned == 1
