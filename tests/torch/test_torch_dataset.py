"""`Dataset.torch_dataset`: the order of `Dataset.epoch`, in loops of PyTorch."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from horovod_spark_runner import Dataset, InvalidInputError
from horovod_spark_runner.data.manifest import Column, Manifest
from horovod_spark_runner.data.prepare.parquet import read_footers
from horovod_spark_runner.storage.filesystem import Location
from tests.unit.test_reader import FILES, ROWS, dataset

# With 12 rows in a global batch: 10 steps, and one of 7 rows.
STEPS = 10


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset(tmp_path_factory.mktemp("data"), FILES)


def tags(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def epoch(data: Dataset, number: int, rank: int = 0, size: int = 1) -> list[list[int]]:
    """Return the tags of one rank's batches, as `Dataset.epoch` has them."""
    return tags(data.epoch(number, rank=rank, size=size, batch_size=12 // size))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [True, False])
def test_rows_come_in_the_order_of_an_epoch(small: Dataset, size: int, drop_last: bool) -> None:
    for rank in range(size):
        rows = small.torch_dataset(batch_size=12 // size, rank=rank, size=size, drop_last=drop_last)
        assert len(rows) == STEPS + (not drop_last)
        for number in range(3):
            assert tags(rows) == epoch(small, number, rank, size)[: len(rows)]
        rows.set_epoch(7)
        rows.set_epoch(7)
        batch = next(iter(rows))
        assert batch["id"].tolist() == epoch(small, 7, rank, size)[0]
        assert batch["v"].dtype == torch.float32
        assert batch["v"].shape == (12 // size, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_epoch_is_resumed_where_it_was_left(small: Dataset, size: int) -> None:
    rank = size - 1
    share: dict[str, Any] = {"rank": rank, "size": size, "batch_size": 12 // size}
    rows = small.torch_dataset(**share, drop_last=False)
    list(rows)
    for at, _ in enumerate(rows, 1):
        if at == 5:
            break
    state = rows.state_dict()
    assert state == {"epoch": 1, "step": 5}
    again = small.torch_dataset(**share, drop_last=False)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.set_epoch(1)  # as at the begin of any epoch
    assert tags(again) == epoch(small, 1, rank, size)[5:]
    # The end of an epoch is the begin of the next.
    assert again.state_dict() == {"epoch": 1, "step": STEPS + 1}
    rows.load_state_dict(again.state_dict())
    assert tags(rows) == tags(again) == epoch(small, 2, rank, size)
    rows.set_epoch(2)
    assert tags(rows) == epoch(small, 2, rank, size)


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_read_each_row_once(small: Dataset, persistent: bool) -> None:
    rows = small.torch_dataset(batch_size=6, rank=1, size=2, drop_last=False)
    tags(rows)  # with threads, before processes are forked
    rows.load_state_dict({"epoch": 1, "step": 4})
    loader = DataLoader(
        rows, batch_size=None, num_workers=2, persistent_workers=persistent, timeout=60
    )
    assert tags(loader) == epoch(small, 1, 1, 2)[4:]
    assert tags(loader) == epoch(small, 2, 1, 2)
    with pytest.raises(InvalidInputError, match=r"StatefulDataLoader.*'epoch': 2"):
        rows.state_dict()
    rows.set_epoch(0)
    assert tags(loader) == epoch(small, 0, 1, 2)
    assert len(loader) == STEPS + 1


def resume(number: int) -> None:
    """Load the state of a worker process, as torchdata's StatefulDataLoader does."""
    rows: Any = get_worker_info().dataset  # type: ignore[union-attr]
    rows.load_state_dict({"epoch": 1, "step": 5 + number})
    iter(rows)
    assert rows.state_dict() == {"epoch": 1, "step": 5 + number}
    rows.load_state_dict(rows.state_dict())


def test_each_worker_process_has_a_position(small: Dataset) -> None:
    rows = small.torch_dataset(batch_size=12, rank=0, size=1)
    loader = DataLoader(rows, batch_size=None, num_workers=2, timeout=60, worker_init_fn=resume)
    assert tags(loader) == epoch(small, 1)[5:STEPS]
    later = DataLoader(rows, batch_size=None, num_workers=2, timeout=60)
    assert tags(later) == epoch(small, 2)[:STEPS]


def test_the_rank_is_that_of_the_process_that_reads(
    small: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = small.torch_dataset(batch_size=4)
    assert tags(rows) == tags(small.torch_dataset(batch_size=4, rank=0, size=1))
    sent = pickle.loads(pickle.dumps(small.torch_dataset(batch_size=4)))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert len(sent) == STEPS
    assert tags(sent) == epoch(small, 0, 2, 3)[:STEPS]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    sent.set_epoch(0)
    assert tags(sent) == tags(small.epoch(0, rank=1, size=2, batch_size=4))[:15]


def test_transforms_draw_the_same_numbers_in_worker_processes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(40), "s": [f"t{n}" for n in range(40)]}), tmp_path / "f")
    footers = read_footers(Location(tmp_path / "f"))
    columns = (Column("id", "float32"), Column("s", "string"))
    manifest = Manifest(str(tmp_path), ("f",), columns, footers.row_groups, "c", file_sizes=(1,))
    data = Dataset(manifest, {"id": vary})
    rows = data.torch_dataset(batch_size=4, rank=0, size=1)
    expected = list(data.epoch(0, rank=0, size=1, batch_size=4))
    loader = DataLoader(rows, batch_size=None, num_workers=2, timeout=60)
    for got, batch in zip(loader, expected, strict=True):
        assert got["id"].tolist() == batch["id"].tolist()
        assert got["s"] == [f"t{int(value)}" for value in batch["id"]]


def vary(value: np.ndarray, generator: np.random.Generator | None) -> np.ndarray:
    assert generator is not None
    return value + generator.random() * 0.9


def test_wrong_torch_datasets_are_refused(small: Dataset, tmp_path: Path) -> None:
    def make(**arguments: Any) -> Any:
        return small.torch_dataset(**{"batch_size": 4, "rank": 0, "size": 2, **arguments})

    for name, wrong in (("batch_size", 0), ("rank", 2), ("seed", -1), ("drop_last", "no")):
        with pytest.raises(InvalidInputError, match=name):
            make(**{name: wrong})
    with pytest.raises(InvalidInputError, match="rank and size"):
        make(size=None)
    few = make(batch_size=ROWS)
    for use in (len, list):
        with pytest.raises(InvalidInputError, match=rf"{ROWS} x 2 .* {ROWS} rows"):
            use(few)
    assert len(make(batch_size=ROWS, drop_last=False)) == 1
    with pytest.raises(InvalidInputError, match="epoch"):
        make().set_epoch(-1)
