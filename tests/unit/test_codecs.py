"""Compressed gradients: what ranks get, against the papers, and what they keep."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_spark_runner import PowerSGD, Threshold, TopK
from horovod_spark_runner.checkpoint.rank_state import RankState, state_for
from horovod_spark_runner.sync.codec import (
    Codec,
    Place,
    _decode_signs,
    _encode_signs,
    _matrix_form,
    _orthonormal,
    largest,
    names_of,
    product,
    rounded,
    widened,
)
from horovod_spark_runner.sync.compressed import _codec_of
from tests.compression import AdaptiveThreshold, GradientCompression, LowRank, Reference, Terms
from tests.threads import Threads, as_ranks

SHAPES: list[tuple[int, ...]] = [(40, 30), (30,), (3, 3, 8, 10), (1,)]
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)
STEPS = 12


def terms_of(step: int, ranks: int) -> Terms:
    """Return what ranks add up: in every third step, the last one has no rows."""
    stream = np.random.default_rng(step)
    drawn = [
        [stream.standard_normal(s).astype(np.float32) ** 3 / ranks for s in SHAPES]
        for _ in range(ranks)
    ]
    if step % 3 == 2:
        drawn[-1] = [np.zeros_like(term) for term in drawn[-1]]
    return drawn


def flat(tensors: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([tensor.ravel() for tensor in tensors])


def train(
    codec: Codec, ranks: int, steps: range, places: list[Place] | None = None
) -> tuple[list[np.ndarray], list[Place]]:
    """Return what all ranks get in each step, and what they keep."""
    places = places or [Place("0.0", SHAPES) for _ in range(ranks)]

    def act(wire: Threads) -> list[np.ndarray]:
        own = [flat(terms_of(step, ranks)[wire.rank]) for step in steps]
        return [
            codec.total(o, places[wire.rank], wire, step)
            for o, step in zip(own, steps, strict=True)
        ]

    of_ranks = as_ranks(ranks, act)
    for other in of_ranks[1:]:
        np.testing.assert_array_equal(other, of_ranks[0])
    return of_ranks[0], places


WAYS: dict[str, Any] = {
    "top_k": TopK(ratio=0.02),
    "top_k, in one message": TopK(ratio=0.6),
    "warm-up": TopK(ratio=0.01, warmup_steps=8),
    "threshold": Threshold(start=2.0, clip_residual=None),
    "threshold, in bits": Threshold(start=0.05, target_sparsity=(0.5, 0.9), clip_residual=None),
    "threshold, late": Threshold(start=0.5, warmup_steps=5, clip_residual=None),
    "power_sgd": PowerSGD(rank=2),
    "power_sgd, late": PowerSGD(rank=4, warmup_steps=5),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_what_was_sent_and_what_is_left_are_the_gradients(way: Any, ranks: int) -> None:
    totals, places = train(_codec_of(way), ranks, range(STEPS))
    left = [place.local["residual"] for place in places]
    gradients = [flat(own) for step in range(STEPS) for own in terms_of(step, ranks)]
    sent = np.sum(totals, axis=0, dtype=np.float64)
    expected = np.sum(gradients, axis=0, dtype=np.float64)
    np.testing.assert_allclose(sent + np.sum(left, axis=0, dtype=np.float64), expected, atol=2e-5)
    held_back = np.abs(expected - sent).max()
    assert (held_back > 0.01) == (ranks > 1)


def shares(way: TopK) -> list[float]:
    """Return the shares of entries that are sent, as the paper's warm-up lets them fall."""
    falling = [way.ratio ** (step / way.warmup_steps) for step in range(way.warmup_steps)]
    return [*falling, *[way.ratio] * STEPS][:STEPS]


def reference(way: Any, places: list[Place]) -> Reference:
    if isinstance(way, TopK):
        return GradientCompression(shares(way), way.momentum)
    if isinstance(way, Threshold):
        return AdaptiveThreshold(way.start, *way.target_sparsity, way.momentum, way.clip_residual)
    forms = {n: form for n, s in enumerate(SHAPES) if (form := _matrix_form(s, way.rank))}
    stream = {n: np.random.default_rng([SEED, n]) for n in forms}
    first = {n: stream[n].standard_normal((form[1], way.rank)) for n, form in forms.items()}
    return LowRank(first)


SEED = 0xF6F40502  # the checksum of the place's name
REFERENCED = [
    TopK(ratio=0.02),
    TopK(ratio=0.02, momentum=0.9),
    TopK(ratio=0.01, warmup_steps=8, momentum=0.5),
    TopK(ratio=0.5),
    Threshold(start=2.0),
    Threshold(start=0.05, target_sparsity=(0.5, 0.9)),
    Threshold(start=0.05, target_sparsity=(0.001, 0.01)),
    Threshold(start=0.05, target_sparsity=(0.001, 0.01), clip_residual=None),
    Threshold(start=0.3, momentum=0.9, clip_residual=2.0),
    PowerSGD(rank=2),
    PowerSGD(rank=3),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", REFERENCED, ids=str)
def test_ranks_get_what_the_papers_say(way: Any, ranks: int) -> None:
    totals, places = train(_codec_of(way), ranks, range(STEPS))
    expected = reference(way, places)
    for step, ours in enumerate(totals):
        terms = terms_of(step, ranks)
        if isinstance(expected, LowRank):
            forms = [_matrix_form(s, way.rank) or s for s in SHAPES]
            terms = [[t.reshape(f) for t, f in zip(own, forms, strict=True)] for own in terms]
        np.testing.assert_allclose(ours, flat(expected.step(terms)), atol=5e-4)
    for place, own in zip(places, expected.residuals, strict=True):
        np.testing.assert_allclose(place.local["residual"], flat(own), atol=5e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_entries_are_the_plain_sum(ranks: int) -> None:
    for way in (TopK(ratio=1.0), PowerSGD(rank=40)):
        codec = _codec_of(way)
        totals, places = train(codec, ranks, range(3))
        for step, ours in enumerate(totals):
            plain = np.sum([flat(own) for own in terms_of(step, ranks)], axis=0, dtype=np.float32)
            np.testing.assert_array_equal(ours, plain)
        assert not any(place.local["residual"].any() for place in places)


def test_factors_of_full_rank_are_the_matrix() -> None:
    matrix = np.random.default_rng(0).standard_normal((12, 40)).astype(np.float32)
    left = _orthonormal(matrix @ np.random.default_rng(1).standard_normal((40, 12)))
    np.testing.assert_allclose(product(left, matrix.T @ left), matrix, atol=1e-5)


@pytest.mark.parametrize(
    "way",
    [*WAYS.values(), TopK(ratio=0.05, momentum=0.9), Threshold(start=0.3, momentum=0.9)],
    ids=str,
)
def test_ranks_go_on_from_what_was_kept_to_the_bit(way: Any) -> None:
    whole, _ = train(_codec_of(way), 2, range(STEPS))
    _, places = train(_codec_of(way), 2, range(7))
    rest, _ = train(_codec_of(way), 2, range(7, STEPS), copy.deepcopy(places))
    np.testing.assert_array_equal(rest, whole[7:])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_number_of_ranks_loses_nothing(ranks: int) -> None:
    _, places = train(_codec_of(TopK(ratio=0.02, momentum=0.9)), 3, range(4))
    kept = [{f"sync/{name}": a for name, a in names_of(place).items()} for place in places]
    states = [RankState({}, arrays) for arrays in kept]
    found = [state_for(states, rank, ranks).arrays for rank in range(ranks)]
    for name in ("sync/sum/residual/0.0", "sync/sum/velocity/0.0"):
        total = np.sum([arrays[name] for arrays in kept], axis=0)
        np.testing.assert_allclose(np.sum([own[name] for own in found], axis=0), total, atol=1e-6)


@pytest.mark.parametrize("way", [TopK(ratio=0.01), Threshold(), PowerSGD()], ids=str)
def test_what_is_no_number_is_not_hidden(way: Any) -> None:
    places = [Place("0.0", SHAPES) for _ in range(2)]

    def act(wire: Threads) -> np.ndarray:
        own = flat(terms_of(0, 2)[wire.rank])
        if wire.rank:
            own[5] = np.nan
        return _codec_of(way).total(own, places[wire.rank], wire, 0)

    assert all(np.isnan(total[5]) for total in as_ranks(2, act))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize(
    "way",
    [
        TopK(ratio=0.05),
        TopK(ratio=0.05, momentum=0.9),
        TopK(ratio=0.6, momentum=0.9),
        Threshold(start=0.5),
        Threshold(start=0.5, momentum=0.9),
        PowerSGD(),
    ],
    ids=str,
)
def test_what_is_no_number_is_not_kept(way: Any, wrong: float, ranks: int) -> None:
    codec, places = _codec_of(way), [Place("0.0", SHAPES) for _ in range(ranks)]

    def act(wire: Threads) -> list[bool]:
        finite = []
        for step in range(4):
            own = flat(terms_of(step, ranks)[wire.rank])
            if step == 1 and wire.rank == ranks - 1:
                own[:1230:2] = wrong
            with np.errstate(invalid="ignore"):
                total = codec.total(own, places[wire.rank], wire, step)
            finite.append(bool(np.isfinite(total).all()))
        return finite

    assert as_ranks(ranks, act) == [[True, False, True, True]] * ranks
    for place in places:
        kept = [*place.local.values(), *place.shared.values()]
        assert all(np.isfinite(array).all() for array in kept)


def test_a_rank_without_what_is_no_number_keeps_what_it_has() -> None:
    codec, places = _codec_of(PowerSGD()), [Place("0.0", SHAPES) for _ in range(2)]

    def act(wire: Threads) -> np.ndarray:
        place = places[wire.rank]
        first, second = (flat(terms_of(step, 2)[wire.rank]) for step in (0, 1))
        codec.total(first, place, wire, 0)
        held: np.ndarray = place.local["residual"] + second
        codec.total(second * np.nan if wire.rank else second, place, wire, 1)
        return held

    held = as_ranks(2, act)
    assert not np.array_equal(held[0], flat(terms_of(1, 2)[0]))
    np.testing.assert_array_equal(places[0].local["residual"], held[0])
    assert not places[1].local["residual"].any()


def test_a_threshold_does_not_fall_to_nothing() -> None:
    codec, places = _codec_of(Threshold(start=0.5)), [Place("0.0", [(3,)]) for _ in range(2)]

    def act(wire: Threads) -> np.ndarray:
        nothing = np.zeros(3, np.float32)
        for step in range(3000):
            assert not codec.total(nothing, places[wire.rank], wire, step).any()
        own = np.array([0.1, -0.1, 0], np.float32)
        return codec.total(own, places[wire.rank], wire, 3000)

    for total in as_ranks(2, act):
        np.testing.assert_allclose(total, [1e-6, -1e-6, 0], rtol=0.04)


def test_half_precision_is_summed_in_single() -> None:
    def act(wire: Threads) -> np.ndarray:
        own = flat(terms_of(0, 3)[wire.rank])
        return _codec_of("bf16").total(own, Place("0.0", SHAPES), wire, 0)

    narrow = [flat(own).astype(ml_dtypes.bfloat16) for own in terms_of(0, 3)]
    summed = np.zeros(SIZE, np.float32)
    for part in narrow:
        summed += part.astype(np.float32)
    for ours in as_ranks(3, act):
        np.testing.assert_array_equal(ours, summed.astype(ml_dtypes.bfloat16).astype(np.float32))


@given(st.lists(st.floats(width=32), min_size=1))
def test_rounding_is_that_of_bfloat16(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(widened(rounded(array)), expected)


@given(st.lists(st.sampled_from([-1, 0, 0, 0, 1]), min_size=1, max_size=200))
def test_messages_say_places_and_signs(signs: list[int]) -> None:
    array = np.array(signs)
    for spread in (1, 60):  # by bits, by places
        spaced = np.zeros(len(array) * spread, int)
        spaced[::spread] = array
        found = _decode_signs(_encode_signs(spaced > 0, spaced < 0, finite=True), spaced.size)
        assert found is not None
        assert [list(each) for each in found] == [
            list(np.flatnonzero(spaced > 0)),
            list(np.flatnonzero(spaced < 0)),
        ]


@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -3.0]), min_size=1), st.integers(1, 30))
def test_the_largest_entries_the_first_of_equal_ones(values: list[float], count: int) -> None:
    array = np.array(values, np.float32)
    expected = np.sort(np.argsort(-np.abs(array), kind="stable")[:count])
    assert list(largest(array, count)) == list(expected)


def test_a_factor_that_has_shown_nothing_is_drawn_anew() -> None:
    codec, place = _codec_of(PowerSGD(rank=2)), [Place("0.0", [(20, 10)]) for _ in range(2)]
    matrix = np.random.default_rng(0).standard_normal((20, 10)).astype(np.float32).ravel()

    def act(wire: Threads) -> np.ndarray:
        own = place[wire.rank]
        first = codec.total(np.zeros_like(matrix), own, wire, 0)
        assert not first.any()
        return codec.total(matrix, own, wire, 1)

    assert all(total.any() for total in as_ranks(2, act))


def test_thin_columns_stay_orthogonal() -> None:
    base = np.random.default_rng(0).standard_normal((50, 2))
    columns = np.stack([base[:, 0], base[:, 0] * 1.0000001, base[:, 1], np.zeros(50)], axis=1)
    made = _orthonormal(columns)
    np.testing.assert_allclose(made.T @ made, np.diag([1, 0, 1, 0]), atol=1e-12)
