"""Models, steps and callbacks as users write them, on two ranks and on one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import HorovodRunner, RanksDivergedError, RestartOptions, run_training
from tests.conformance.data import write_once

pytestmark = [pytest.mark.mpi, pytest.mark.spark]


def train_all(data: str, folder: str) -> dict[str, Any]:
    from tests.mpi import users_cases

    return users_cases.train_all(data, folder)


@pytest.fixture(scope="module")
def worlds(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, ...]]:
    """What came of all cases, by size of the world and by rank."""
    folder = tmp_path_factory.mktemp("users")
    data = write_once(folder)
    return {
        size: HorovodRunner(size, stream_logs=False)
        .run(train_all, str(data), str(folder / f"of-{size}"))
        .results
        for size in (1, 2)
    }


def same(ours: list[np.ndarray], theirs: list[np.ndarray], atol: float = 0.0) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def trained(worlds: Any, name: str) -> tuple[Any, Any, Any]:
    """Return what came of a case on one rank and on each of two, all of which ended well."""
    one, first, second = worlds[1][0][name], worlds[2][0][name], worlds[2][1][name]
    assert [each["error"] for each in (one, first, second)] == ["", "", ""]
    return one, first, second


KEPT = ("dict", "list", "sub-models", "helper")


@pytest.mark.thorough
@pytest.mark.parametrize("keep", KEPT)
def test_optimizers_are_averaged_wherever_they_are_kept(worlds: Any, keep: str) -> None:
    one, first, second = trained(worlds, f"optimizers-{keep}")
    same(first["weights"], second["weights"])
    same(first["weights"], one["weights"], 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["optimizers-dict", "optimizers-helper", "rates-of-multi"])
@pytest.mark.parametrize("size", [1, 2])
def test_all_optimizers_are_gone_on_with(worlds: Any, name: str, size: int) -> None:
    for found in worlds[size]:
        whole, parts = found[name], found[f"{name} resumed"]
        assert [each["error"] for each in (whole, parts)] == ["", ""]
        assert parts["history"] == whole["history"]
        same(parts["weights"], whole["weights"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "messages"),
    [
        (
            "rate-of-its-own",
            (
                "RanksDivergedError: .*end of epoch 1",
                "rank 1",
                "rank 1.*'sgd/learning_rate'",
                "clock",
            ),
        ),
        (
            "assigns-on-one-rank",
            ("RanksDivergedError: .*end of epoch 1.* 1 of", "rank 1", "kernel'", "callback"),
        ),
        (
            "begins-on-one-rank",
            ("RanksDivergedError: .*(begin|start).*epoch 2.* 1 of", "rank 1", "kernel'"),
        ),
        (
            "assigns-itself",
            ("RanksDivergedError: .*first step", "rank 1", "kernel'", "train_step"),
        ),
        (
            "by-autograph",
            ("ModelError: .*train_step", "condition.*tensor"),
        ),
    ],
)
def test_ranks_that_would_part_end_with_a_reason(
    worlds: Any, name: str, messages: tuple[str, ...]
) -> None:
    assert worlds[1][0][name]["error"] == ""
    for found in worlds[2]:
        assert re.match(messages[0], found[name]["error"])
        for message in messages:
            assert re.search(message, found[name]["error"])


@pytest.mark.thorough
def test_a_step_that_sums_is_refused_on_all_ranks(worlds: Any) -> None:
    assert worlds[1][0]["sums-rows"]["error"] == ""
    for found in worlds[2]:
        assert re.search(r"ModelError.*train_step.*\bsum.*rows", found["sums-rows"]["error"])
        assert not any("batch_end" in call[0] for call in found["sums-rows"]["calls"])


@pytest.mark.thorough
def test_a_sum_whose_factor_rises_is_refused_when_the_step_is_tried_again(worlds: Any) -> None:
    assert worlds[1][0]["anneals"]["error"] == ""
    for found in worlds[2]:
        assert re.search(r"ModelError.*train_step.*\bsum.*\b4\b.*\b2\b", found["anneals"]["error"])
        ended = [call for call in found["anneals"]["calls"] if "train_batch_end" in call[0]]
        assert len(ended) == 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["adam", "adagrad", "rmsprop", "ftrl", "clipnorm", "global_clipnorm"]
)
def test_an_embedding_is_trained_as_by_its_dense_gradient(worlds: Any, name: str) -> None:
    """Keras itself squares, and clips, the slices of a repeated token one by one."""
    one, first, second = trained(worlds, f"embedding-{name}")
    dense = worlds[1][0][f"dense-{name}"]
    assert dense["error"] == ""
    weights = len(dense["weights"])
    same(one["weights"][:weights], dense["weights"], 1e-6)
    same(first["weights"], second["weights"])
    same(first["weights"][:weights], dense["weights"], 2e-5)


@pytest.mark.thorough
def test_synchronised_batch_normalisation_is_that_of_the_global_batch(worlds: Any) -> None:
    one, first, second = trained(worlds, "synchronized")
    same(first["weights"], second["weights"])
    same(first["weights"], one["weights"], 1e-5)


@pytest.mark.thorough
def test_ranks_draw_other_noise(worlds: Any) -> None:
    _, first, second = trained(worlds, "noise")
    drawn = np.array([first["noise.json"], second["noise.json"]])
    assert drawn.shape == (2, 8, 2)
    assert not set(drawn[0].ravel()) & set(drawn[1].ravel())
    assert len(np.unique(drawn[..., 0])) == 16  # keras.random never repeats itself


@pytest.mark.thorough
def test_what_a_scheduler_sets_stands(worlds: Any) -> None:
    for each in trained(worlds, "rate-scheduled"):
        rates = np.ravel(each["rates.json"])
        np.testing.assert_allclose(rates, np.repeat([0.04, 0.02, 0.01], 4), rtol=1e-6)


@pytest.mark.thorough
def test_every_optimizers_rate_is_scaled(worlds: Any) -> None:
    one, first, _ = trained(worlds, "rates-of-two")
    np.testing.assert_allclose(first["rates.json"], 2 * np.array(one["rates.json"]), rtol=1e-6)
    assert one["rates.json"][0] == pytest.approx([0.001, 0.05, 0.02])


@pytest.mark.thorough
def test_the_rates_of_wrapped_optimizers_are_warmed_up(worlds: Any) -> None:
    one, first, _ = trained(worlds, "rates-of-multi")
    factors = np.array(first["rates.json"]) / np.array(one["rates.json"])
    expected = np.array([1, 1.25, 1.5, 1.75, *[2] * 8])
    np.testing.assert_allclose(factors, np.stack([expected, expected], 1), rtol=1e-6)


@pytest.mark.thorough
def test_a_backup_that_rank_0_restores_reaches_all(worlds: Any) -> None:
    for size in (1, 2):
        assert {found["backup"]["error"] for found in worlds[size]} == {"ValueError: struck"}
    one, first, second = trained(worlds, "backup-again")
    for each in (one, first, second):
        epochs = [index for method, index, _ in each["calls"] if method == "on_epoch_begin"]
        assert epochs == [1, 2]
    assert first["calls"] == second["calls"]
    same(first["weights"], second["weights"])
    same(first["weights"], one["weights"], 1e-5)


@pytest.mark.thorough
def test_summaries_of_a_model_are_written(worlds: Any) -> None:
    for each in trained(worlds, "summaries")[:2]:
        assert any(b"what passes through" in events for events in each["events"])


@pytest.mark.thorough
def test_callbacks_see_the_same_logs_on_all_ranks(worlds: Any) -> None:
    for name in ("synchronized", "rates-of-multi"):
        one, first, second = trained(worlds, name)
        assert first["calls"] == second["calls"]
        assert [call[:2] for call in first["calls"]] == [call[:2] for call in one["calls"]]


@pytest.mark.thorough
def test_shares_that_are_never_equal(worlds: Any) -> None:
    """15 rows a step on two ranks, as after a restart of three with one rank fewer."""
    one, first, second = (found["another share"] for found in (*worlds[1], *worlds[2]))
    same(first["weights"], second["weights"])
    same(first["weights"], one["weights"], 1e-5)
    for ours, theirs in zip(first["history"], one["history"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.thorough
def test_what_else_a_step_logs_is_weighed_by_rows(worlds: Any) -> None:
    for found in worlds[2]:  # (3·1 + 1·2) / 4
        assert float(found["logs"]["own"]) == pytest.approx(1.25)


def test_the_driver_names_variable_and_rank_and_does_not_try_again(
    spark: Any, tmp_path: Path
) -> None:
    def model_fn() -> Any:
        import keras

        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="head")])
        model.compile("sgd", "mse")
        return model

    folder = str(tmp_path)

    def callbacks() -> list[Any]:
        import horovod.tensorflow as hvd
        import keras

        class OnOne(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                with Path(folder, f"epoch-{epoch}-{hvd.rank()}").open("a") as note:
                    note.write("x")
                bias = self.model.layers[-1].bias
                bias.assign(bias + hvd.rank())

        return [OnOne()]

    frame = spark.createDataFrame([(float(n), 2.0 * n) for n in range(16)], "x float, y float")
    with pytest.raises(
        RanksDivergedError, match=r"end of epoch 1.* rank 1.*'[a-z_0-9]+/head/bias'"
    ):
        run_training(
            frame,
            model_fn,
            feature_cols=["x"],
            label_cols=["y"],
            num_workers=2,
            batch_size=4,
            epochs=3,
            run_dir=str(tmp_path / "run"),
            restarts=RestartOptions(max_restarts=2, backoff_seconds=0.1),
            callbacks=callbacks,
            stream_logs=False,
        )
    noted = {path.name: path.read_text() for path in tmp_path.glob("epoch-*")}
    assert noted == {"epoch-0-0": "x", "epoch-0-1": "x"}
