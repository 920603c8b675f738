"""Compressed allreduce: what it keeps in checkpoints, and takes of those of other ways."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import ModelError, PowerSGD, RunDirectoryError, Threshold, TopK
from horovod_spark_runner.cluster.worker import reporting
from horovod_spark_runner.sync import compressed
from horovod_spark_runner.sync.codec import notice_late_momentum
from horovod_spark_runner.sync.compressed import CompressedSynchroniser
from tests.numpy_engine import Part, Sums
from tests.threads import Threads, as_ranks

Arrays = dict[str, np.ndarray]
TOP, MOMENTUM = TopK(ratio=0.1), TopK(ratio=0.1, momentum=0.9)


def gradients(step: int, rank: int, shape: tuple[int, ...] = (12, 10)) -> np.ndarray:
    return np.random.default_rng([step, rank]).standard_normal(shape).astype(np.float32)


def trained(
    way: Any, kept: Sequence[Arrays], steps: range, places: Sequence[str] = ("0.0",)
) -> list[tuple[Arrays, list[np.ndarray]]]:
    """Go on from what two ranks have kept; return what each keeps, and what it was given."""

    def act(wire: Threads) -> tuple[Arrays, list[Any]]:
        sync = CompressedSynchroniser(way, Sums(), wire)
        sync.restore(kept[wire.rank])
        given: list[Any] = []
        for step in steps:
            sync.before_step(step)
            for place in places:
                own = [gradients(step, wire.rank)]
                given += sync.gradients(own, Part(0.5), "gradients", place)[0]
        return sync.capture(wire.rank), given

    return as_ranks(2, act)


def kept_by(way: Any, **given: Any) -> list[Arrays]:
    return [kept for kept, _ in trained(way, [{}, {}], range(4), **given)]


def names(kept: Sequence[Arrays]) -> list[list[str]]:
    return [sorted(own) for own in kept]


def test_what_a_way_keeps_is_named() -> None:
    rest = "sum/residual/0.0"
    assert names(kept_by(TOP)) == [[rest]] * 2
    assert names(kept_by(MOMENTUM)) == [[rest, "sum/velocity/0.0"]] * 2
    assert names(kept_by(Threshold())) == [["shared/threshold/0.0", rest], [rest]]
    assert names(kept_by(PowerSGD())) == [["shared/factor/00000/0.0", rest], [rest]]
    assert names(kept_by("bf16")) == [[], []]


# What a way keeps, another that has no use for it forgets: later, it would be of long ago.
@pytest.mark.parametrize(
    ("first", "between", "left"),
    [
        (TOP, "bf16", set()),
        (MOMENTUM, "bf16", set()),
        (MOMENTUM, TOP, {"sum/residual/0.0"}),
        (MOMENTUM, PowerSGD(), {"sum/residual/0.0", "shared/factor/00000/0.0"}),
        (PowerSGD(), TOP, {"sum/residual/0.0"}),
        (Threshold(), PowerSGD(), {"sum/residual/0.0", "shared/factor/00000/0.0"}),
    ],
    ids=lambda given: str(sorted(given) if isinstance(given, set) else given),
)
@pytest.mark.parametrize("steps", [0, 2])
def test_what_another_way_does_not_keep_is_forgotten(
    first: Any, between: Any, left: set[str], steps: int
) -> None:
    begun = kept_by(first)
    kept = [own for own, _ in trained(between, begun, range(4, 4 + steps))]
    found = {name for own in kept for name in own}
    assert found == (left if steps else left - {"shared/factor/00000/0.0"})
    rest = "sum/residual/0.0"
    if rest in left:  # nothing of it is lost
        given = [own.pop(rest) for own in kept]
        same = [np.array_equal(ours, own[rest]) for ours, own in zip(given, begun, strict=True)]
        assert same == [not steps] * 2


def test_what_another_way_keeps_by_the_same_name_is_not_taken() -> None:
    outer = {"shared/velocity/model/00000": np.ones(120, np.float32)}
    for kept, _ in trained(MOMENTUM, [outer, outer], range(1)):
        assert sorted(kept) == ["sum/residual/0.0", "sum/velocity/0.0"]


def test_momentum_on_what_comes_late_is_told() -> None:
    said: list[str] = []

    class Said:
        def sendall(self, data: bytes) -> None:
            said.append(json.loads(data)["text"])

    reporting.connect(Said())
    try:
        notice_late_momentum(Threshold(), moves=False)
        notice_late_momentum(TopK(ratio=0.1), moves=True)
        assert not said
        notice_late_momentum(Threshold(), moves=True)
    finally:
        reporting.connect(None)
    (text,) = said
    assert "Threshold(…, momentum=0.9)" in text


@pytest.mark.parametrize("way", [MOMENTUM, Threshold(start=1.0), PowerSGD()], ids=str)
def test_what_is_kept_of_gradients_that_do_not_come_stays(way: Any) -> None:
    both = ("0.0", "1.0")
    begun = kept_by(way, places=both)
    # Two runs that end before the second optimizer has stepped.
    kept = begun
    for step in (4, 5):
        kept = [own for own, _ in trained(way, kept, range(step, step + 1))]
    assert names(kept) == names(begun)
    for own, before in zip(kept, begun, strict=True):
        for name in before:
            same = np.array_equal(own[name], before[name])
            assert same == name.endswith("/1.0"), name
    # It is used once the second one steps.
    late = trained(way, kept, range(6, 7), places=["1.0"])
    early = trained(way, begun, range(6, 7), places=["1.0"])
    np.testing.assert_array_equal(late[0][1][0], early[0][1][0])


@pytest.mark.parametrize("way", ["bf16", TOP], ids=str)
def test_other_variables_are_refused_where_something_is_kept(way: Any) -> None:
    def act(wire: Threads) -> list[tuple[int, ...]]:
        sync = CompressedSynchroniser(way, Sums(), wire)
        shapes = [(12, 10), (3,)]
        given: list[Any] = [
            sync.gradients([gradients(0, wire.rank, shape)], Part(0.5), "gradients", "0.0")[0][0]
            for shape in shapes
        ]
        assert [one.shape for one in given] == shapes
        return shapes

    if way == "bf16":
        as_ranks(2, act)
        return
    with pytest.raises(ModelError, match=r"\(3,\).*\(12, 10\)"):
        as_ranks(2, act)


def test_a_rest_of_other_weights_is_refused() -> None:
    kept = [{"sum/residual/0.0": np.ones(7, np.float32)}] * 2
    with pytest.raises(RunDirectoryError, match=r"7 .*\b120"):
        trained(TOP, kept, range(1))


@pytest.mark.parametrize("way", [TOP, Threshold(), PowerSGD(), "bf16"], ids=str)
def test_places_are_numbers_of_31_bits(monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    monkeypatch.setattr(compressed, "_MOST_ENTRIES", 120)
    if way in (TOP, Threshold()):
        with pytest.raises(ModelError, match="120 .*compression='bf16'.*PowerSGD"):
            kept_by(way)
    else:
        kept_by(way)
