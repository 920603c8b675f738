"""Keras' own tests of ``fit`` pass with our training in its place."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import ROOT

from .reasons import reason_for, unused_patterns
from .run import SECONDS, Result, run_suite
from .table import kind_of, render

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(SECONDS + 60)]

Results = dict[str, Result]


@pytest.fixture(scope="module")
def results() -> Results:
    found, output = run_suite()
    assert found, output
    return found


@pytest.mark.thorough
def test_every_test_passes_or_has_a_reason(results: Results) -> None:
    kinds = Counter(kind_of(name, result) for name, result in results.items())
    print(f"Keras' own tests: {dict(kinds)}")
    failed = {
        name: (result.message, result.refused)
        for name, result in results.items()
        if kind_of(name, result) == "failed"
    }
    assert not failed


def test_no_reason_is_given_in_vain(results: Results) -> None:
    in_vain = [
        name
        for name, result in results.items()
        if reason_for(name) is not None and kind_of(name, result) in ("trained", "no training")
    ]
    assert not in_vain
    assert not unused_patterns(results)


def test_our_training_is_really_used(results: Results) -> None:
    trained = [name for name, result in results.items() if kind_of(name, result) == "trained"]
    for module in ("trainers.trainer_test", "callbacks.early_stopping_test"):
        assert any(name.startswith(module) for name in trained)
    assert len(trained) >= 150


def test_the_table_is_current(results: Results) -> None:
    assert (ROOT / "docs" / "keras-tests.md").read_text() == render(results)
