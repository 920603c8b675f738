"""Recordings held against each other. Pure: every function returns what differs, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .case import Case
from .recording import Call, Recording

SHOWN = 6


def one_rank(case: Case, fit: Recording, ours: Recording) -> list[str]:
    """Return where one rank differs from ``Model.fit``."""
    if case.refused:
        return _refusal(case.refused, ours)
    if fit.error:
        return [f"Model.fit itself raised {fit.error}\n{fit.trace}"]
    if ours.error:
        return [f"one rank raised {ours.error}\n{ours.trace}"]
    return [
        *_arrays("weight", fit.weights, ours.weights, case.one),
        *_arrays("optimizer variable", fit.optimizer, ours.optimizer, case.one),
        *_values("history", fit.history, ours.history, case.one),
        # What is printed is another matter.
        *_values("params", {**fit.params, "verbose": 0}, {**ours.params, "verbose": 0}, 0.0),
        *([] if "verbose" in ours.params else ["params lack 'verbose'"]),
        *_call_names(fit.calls, ours.calls),
        *_call_logs(fit.calls, ours.calls, case.one),
        *_values("files", fit.files, ours.files, 0.0),
    ]


def two_ranks(case: Case, one: Recording, first: Recording, second: Recording) -> list[str]:
    """Return where two ranks differ from each other, and from one."""
    if told := case.refused or case.refused_by_two:
        return [*_refusal(told, first), *_refusal(told, second)]
    for name, recording in (("rank 0", first), ("rank 1", second)):
        if recording.error:
            return [f"{name} raised {recording.error}\n{recording.trace}"]
    if one.error:
        return [f"one rank, to compare with, raised {one.error}"]
    found = [
        *_arrays("weight", first.weights, second.weights, 0.0),
        *_arrays("optimizer variable", first.optimizer, second.optimizer, 0.0),
        *_values("history", first.history, second.history, 0.0),
        *_call_names(first.calls, second.calls),
        # What a rank's own part of the validation data gives is its own.
        *_call_logs(_without_test_batches(first.calls), _without_test_batches(second.calls), 0.0),
    ]
    found = [f"between the ranks: {text}" for text in found]
    if _finite(one) and not _finite(first):
        found.append("weights are not finite")
    found += _call_names(one.calls, first.calls)
    if case.two is not None:
        found += [
            *_arrays("weight", one.weights, first.weights, case.two),
            *_values("history", one.history, first.history, case.two),
            *_call_logs(
                _without_test_batches(one.calls), _without_test_batches(first.calls), case.two
            ),
        ]
    return found


def prediction(case: Case, ours: Recording) -> list[str]:
    """Return where the saved model predicts other than the trained one."""
    if case.refused:
        return []
    if ours.error:
        return [f"one rank raised {ours.error}"]
    if case.predicts is None:
        return [
            f"{way} was to raise 'cannot predict', got {ours.failures.get(way) or 'no error'}"
            for way in ("run_training", "from_run")
            if "cannot predict" not in ours.failures.get(way, "")
        ]
    if "model" in ours.failures:
        return [f"model.predict itself raised {ours.failures['model']}"]
    found = []
    if case.lost and case.lost not in ours.failures.get("from_run", ""):
        told = ours.failures.get("from_run") or "no error"
        found.append(f"from_run was to raise {case.lost!r}, got {told}")
    for way in ("run_training", "model_fn" if case.lost else "from_run"):
        if way in ours.failures:
            found.append(f"{way} raised {ours.failures[way]}")
            continue
        expected, got = ours.predictions["model"], ours.predictions[way]
        if len(expected) != len(got):
            found.append(f"{way} gives {len(got)} outputs, the model {len(expected)}")
            continue
        for number, (want, have) in enumerate(zip(expected, got, strict=True)):
            found += _array(f"{way}, output {number}", want, have, case.predicts)
    return found


def _refusal(told: str, ours: Recording) -> list[str]:
    if not ours.error:
        return [f"was to be refused ({told!r}), but was trained"]
    if told not in ours.error:
        return [f"was to be refused with {told!r}, but raised {ours.error}\n{ours.trace}"]
    first_step = [name for name, _, _ in ours.calls if name == "on_train_batch_end"]
    return ["was refused only after steps were trained"] if first_step else []


def _arrays(
    what: str, want: Mapping[str, np.ndarray], have: Mapping[str, np.ndarray], tolerance: float
) -> list[str]:
    if len(want) != len(have):
        return [f"{len(have)} {what}s {list(have)}, expected {len(want)}: {list(want)}"]
    pairs = zip(want.items(), have.items(), strict=True)
    found = [t for (name, a), (_, b) in pairs for t in _array(f"{what} {name}", a, b, tolerance)]
    return _shortened(found)


def _array(what: str, want: np.ndarray, have: np.ndarray, tolerance: float) -> list[str]:
    if want.shape != have.shape:
        return [f"{what}: shape {have.shape}, expected {want.shape}"]
    if want.dtype.kind not in "fc":
        return [] if np.array_equal(want, have) else [f"{what}: {have}, expected {want}"]
    far = _distance(want, have)
    if far <= tolerance:
        return []
    place = np.unravel_index(np.argmax(_distances(want, have)), want.shape) if want.ndim else ()
    return [f"{what}: off by {far:.2g} ({have[place]!r}, expected {want[place]!r})"]


def _distances(want: np.ndarray, have: np.ndarray) -> np.ndarray:
    want, have = want.astype(np.float64), have.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.abs(want - have) / np.maximum(1.0, np.abs(want))
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))


def _distance(want: np.ndarray, have: np.ndarray) -> float:
    return float(_distances(want, have).max(initial=0.0))


def _values(
    what: str, want: Mapping[str, Any], have: Mapping[str, Any], tolerance: float
) -> list[str]:
    """Compare dictionaries of numbers, lists and text."""
    found = []
    if set(want) != set(have):
        lacking, further = sorted(set(want) - set(have)), sorted(set(have) - set(want))
        found.append(f"{what}: lacks {lacking}, has {further} too")
    for name in want.keys() & have.keys():
        if not _equal(want[name], have[name], tolerance):
            found.append(f"{what} {name!r}: {have[name]!r}, expected {want[name]!r}")
    return found


def _equal(want: Any, have: Any, tolerance: float) -> bool:
    if isinstance(want, Mapping) and isinstance(have, Mapping):
        return want.keys() == have.keys() and all(
            _equal(want[name], have[name], tolerance) for name in want
        )
    numbers = (bool, int, float, list)
    if isinstance(want, numbers) and isinstance(have, numbers):
        try:
            a, b = np.array(want, np.float64), np.array(have, np.float64)
        except (TypeError, ValueError):
            return bool(want == have)
        return a.shape == b.shape and _distance(a, b) <= tolerance
    return bool(want == have)


def _call_names(want: list[Call], have: list[Call]) -> list[str]:
    expected = [_shown(call) for call in want]
    found = [_shown(call) for call in have]
    for number, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return [f"callback call {number} is {b}, expected {a}"]
    if len(expected) != len(found):
        more, less = (found, expected) if len(found) > len(expected) else (expected, found)
        text = "too many" if more is found else "lack"
        return [f"callback calls {text}: {more[len(less) :][:5]}"]
    return []


def _call_logs(want: list[Call], have: list[Call], tolerance: float) -> list[str]:
    pairs = zip(want, have, strict=False)
    return _shortened(
        [
            text
            for a, b in pairs
            if _shown(a) == _shown(b)
            for text in _values(f"logs of {_shown(a)}", a[2], b[2], tolerance)
        ]
    )


def _finite(recording: Recording) -> bool:
    weights = [v for v in recording.weights.values() if v.dtype.kind == "f"]
    return all(bool(np.all(np.isfinite(value))) for value in weights)


def _without_test_batches(calls: list[Call]) -> list[Call]:
    return [call for call in calls if not call[0].startswith("on_test_batch")]


def _shown(call: Call) -> str:
    method, index, _ = call
    return method if index is None else f"{method}({index})"


def _shortened(found: list[str]) -> list[str]:
    if len(found) <= SHOWN:
        return found
    return [*found[:SHOWN], f"… and {len(found) - SHOWN} more"]
