"""Spaces, studies and what is told of them; no Spark."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from horovod_spark_runner import (
    Allreduce,
    EnvironmentProblem,
    InvalidInputError,
    ModelError,
    RunDirectoryError,
    TopK,
)
from horovod_spark_runner.commands import tune as command
from horovod_spark_runner.config.sync import LocalSGD
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.tune import choice, integer, loguniform, tune, uniform
from horovod_spark_runner.tune.directory import (
    StudyDirectory,
    begin_or_check,
    check_same,
    check_whole,
    trial_line,
)
from horovod_spark_runner.tune.search import _check_trial_run, _final_value
from horovod_spark_runner.tune.space import Space, check_space, describe_space, suggest
from horovod_spark_runner.tune.study import Study, check_sampler, make_pruner, sampler_for
from horovod_spark_runner.tune.trial_config import check_names, checked_params

SPACE = {"lr": loguniform(1e-4, 1.0), "units": choice(8, "many", None), "depth": integer(1, 3)}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: uniform(1, 0), "lower"),
        (lambda: uniform(0, math.inf), "finite"),
        (lambda: uniform(True, 2), "finite"),
        (lambda: loguniform(0, 1), r"\b0(?!.*lower)"),
        (lambda: integer(1.5, 2), "whole|integers"),  # type: ignore[arg-type]
        (lambda: integer(0, 9, log=True), r"\b0(?!.*lower)"),
        (lambda: choice(), "values"),
        (lambda: choice(1, 1), "once"),
        (lambda: choice(1, True), "1, 1.0.*True"),
        (lambda: choice(math.nan), "nan.*float"),
        (lambda: choice(0.1, math.inf), "inf.*float"),
        (lambda: choice((1, 2)), r"\(1, 2\).*tuple"),
        (lambda: check_space({}), "space.*dict"),
        (lambda: check_space({"lr": 0.1}), "space.*'lr'.*0.1"),
        (lambda: check_sampler("gird", SPACE), "sampler.*tpe, random, grid"),
        (lambda: check_sampler("grid", SPACE), "choice.*'lr'.*Range"),
        (
            lambda: check_sampler("grid", {"a": integer(1, 10**30), "b": choice(1, 2)}),
            "grid.*2,0{3}.*,000.*100,000",
        ),
        (lambda: check_sampler("grid", lambda _: {}), "choice.*function"),
        (lambda: make_pruner("asha", 1), "epochs=1"),
        (lambda: make_pruner("hyper", 1), "pruner.*median, asha, hyperband"),
        (lambda: make_pruner(optuna.pruners.MedianPruner(), 1), "epochs=1"),
    ],
)
def test_what_cannot_be_searched_is_refused(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        make()


@pytest.mark.parametrize(
    ("space", "given", "told"),
    [
        ({"batch_size": integer(0, 8)}, {}, r"space\['batch_size'\]"),
        ({"batch_size": uniform(1, 8)}, {}, r"space\['batch_size'\]"),
        ({"lr_scaling": choice("linear", "log")}, {}, r"space\['lr_scaling'\]"),
        ({"epochs": integer(1, 3)}, {"epochs": 3}, "epochs=…"),
        ({"seed": integer(1, 3)}, {}, "'seed'.*space.*setting"),
        ({"num_workers": choice(1, 2)}, {}, "batch_size, epochs"),
        ({"algorithm": choice("ring")}, {}, "parameter.*model_fn"),
        ({"workers_per_trial": choice(1, 2)}, {}, "'workers_per_trial'.*space"),
        ({"every": choice(4, 8)}, {}, "'every'.*space.*setting"),
        (
            {"compression": choice("none", "fp16")},
            {"sync": LocalSGD(every=4)},
            r"'compression'.*space.*Allreduce.*sync=LocalSGD\(every=4",
        ),
    ],
)
def test_settings_are_told_from_parameters_by_their_names(
    space: Space, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInputError, match=told):
        check_names(space, given)
    check_names({"lr": uniform(0, 1), "batch_size": integer(1, 8), "epochs": choice(1, 2)}, {})


def test_no_argument_of_the_search_is_taken_for_a_parameter() -> None:
    for name in inspect.signature(tune).parameters.keys() - {"training"}:
        with pytest.raises(InvalidInputError, match=f"'{name}'.*space.*set"):
            check_names({name: choice(1, 2)}, {})


def test_spaces_that_differ_are_told_apart() -> None:
    other = {**SPACE, "depth": integer(1, 3, log=True)}
    assert describe_space(SPACE) == describe_space(dict(SPACE)) != describe_space(other)


def open_study(
    folder: Path, sampler: Any = "tpe", seed: int = 0, pruner: Any = None
) -> tuple[StudyDirectory, Study]:
    directory = StudyDirectory(Location(folder))
    directory.location.make_folder()
    begin_or_check(directory, {"metric": "loss", "direction": "min"})
    directory.mend_journal()
    choosing = partial(sampler_for, sampler, SPACE, seed, side_by_side=False)
    return directory, Study(directory, "min", choosing, pruner)


def draw(study: Study, *values: float) -> list[dict[str, Any]]:
    drawn = []
    for value in values:
        asked = study.ask(lambda trial: suggest(SPACE, trial))
        assert asked is not None
        drawn.append(asked[1])
        study.finish(asked[0], value)
    return drawn


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_seed_gives_the_same_trials_in_one_go_or_several(tmp_path: Path, sampler: str) -> None:
    values = [float(number % 5) for number in range(14)]  # beyond where tpe only draws
    whole = draw(open_study(tmp_path / "a", sampler=sampler, seed=3)[1], *values)
    parts = [
        one
        for part in (values[:3], values[3:12], values[12:])
        for one in draw(open_study(tmp_path / "b", sampler=sampler, seed=3)[1], *part)
    ]
    other = draw(open_study(tmp_path / "c", sampler=sampler, seed=4)[1], *values)
    assert whole == parts
    assert len({one["lr"] for one in whole}) == len(whole)
    assert whole != other


def test_a_trial_that_was_left_goes_on_under_its_number(tmp_path: Path) -> None:
    _, study = open_study(tmp_path)
    draw(study, 2.0)
    left = study.ask(lambda trial: suggest(SPACE, trial))
    assert left is not None
    left[0].report(0.5, 1)
    directory = StudyDirectory(Location(tmp_path))
    with open(str(directory.journal), "a") as journal:
        journal.write('{"half')
    (tmp_path / "journal.log.lock").symlink_to(tmp_path / "journal.log")
    _, again = open_study(tmp_path)
    assert again.take_up() == 1
    taken = again.ask(lambda trial: pytest.fail("its parameters are known"))
    assert taken is not None
    assert (taken[0].number, taken[1]) == (1, left[1])
    assert again.reported(1) == {1: 0.5}
    again.finish(taken[0], 1.0)
    again.put_back(1)  # which does nothing to a finished one
    best = again.best()
    assert best is not None
    assert (best.number, len(again.trials())) == (1, 2)


def test_a_grid_comes_to_its_end(tmp_path: Path) -> None:
    grid: dict[str, list[Any]] = {"lr": [0.1, 0.2], "units": [8], "depth": [1]}
    _, study = open_study(tmp_path, sampler=optuna.samplers.GridSampler(grid, seed=1))
    drawn = draw(study, 1.0)
    assert not study.exhausted
    drawn += draw(study, 2.0)
    assert study.exhausted
    assert sorted(one["lr"] for one in drawn) == [0.1, 0.2]
    assert [one.state.name for one in study.trials()] == ["COMPLETE", "COMPLETE"]


def ask(study: Study, space: Space) -> tuple[optuna.Trial, dict[str, Any]]:
    asked = study.ask(lambda trial: suggest(space, trial))
    assert asked is not None
    return asked


def test_trials_side_by_side_are_each_given_a_point_of_the_grid(tmp_path: Path) -> None:
    """Also once a search goes on: what was begun comes first."""
    space: Space = {"units": integer(1, 2), "kind": choice("a", None)}
    choosing = partial(sampler_for, "grid", space, 0, side_by_side=True)
    study = Study(open_study(tmp_path)[0], "min", choosing)
    begun = []
    while not study.exhausted:
        begun.append(ask(study, space))
    points = {tuple(params.values()) for _, params in begun}
    assert points == {(1, "a"), (1, None), (2, "a"), (2, None)}
    assert len(begun) == 4
    study.fail(begun[0][0], "its own fault")
    study.finish(begun[1][0], 1.0)
    again = Study(open_study(tmp_path)[0], "min", choosing)
    assert again.take_up() == 2
    left = []
    while not again.exhausted:
        left.append(ask(again, space))
    assert [(trial.number, params) for trial, params in left] == [
        (trial.number, params) for trial, params in begun[2:]
    ]


def test_a_sampler_that_has_tried_all_ends_the_search(tmp_path: Path) -> None:
    space: Space = {"units": integer(1, 2)}
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        sampler = optuna.samplers.BruteForceSampler(seed=1)
    _, study = open_study(tmp_path, sampler=sampler)
    tried = []
    while not study.exhausted:
        trial, params = ask(study, space)
        study.finish(trial, 1.0)
        tried.append(params["units"])
    assert sorted(tried) == [1, 2]


@pytest.mark.parametrize("made", [optuna.samplers.CmaEsSampler(), optuna.samplers.GPSampler()])
def test_what_a_sampler_needs_is_looked_for_at_once(
    made: optuna.samplers.BaseSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"Sampler\(…\).*pip install"):
        check_sampler(made, SPACE)


def test_a_sampler_that_does_not_know_the_space_is_named(tmp_path: Path) -> None:
    grid = optuna.samplers.GridSampler({"lr": [0.1]})
    _, study = open_study(tmp_path, sampler=grid)
    with pytest.raises(InvalidInputError, match=r"space.*\bunits\b"):
        ask(study, SPACE)
    assert study.trials() == []


def test_what_a_function_gives_is_kept_as_json() -> None:
    given = {"lr": np.float64(0.5), "units": np.int64(4), "class_weight": {0: 1.0, 1: 2}}
    kept = checked_params(given, {})
    assert kept == {"lr": 0.5, "units": 4, "class_weight": {"0": 1.0, "1": 2.0}}
    assert json.loads(json.dumps(kept)) == kept
    top_k = {"way": "top_k", "ratio": 0.01}
    for one in (top_k, TopK(ratio=0.01)):
        chosen = checked_params({"compression": one}, {})
        assert json.loads(json.dumps(chosen)) == chosen
        assert Allreduce(**chosen) == Allreduce(compression=top_k)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="batch_size.*space"):
        checked_params({"batch_size": 20.5}, {})
    with pytest.raises(InvalidInputError, match="'run_dir'.*space.*setting"):
        checked_params({"run_dir": "here"}, {})


def test_a_trial_is_worth_what_its_model_is() -> None:
    history = [{"loss": 3.0, "val_loss": 2.0}, {"loss": 2.0, "val_loss": 1.0}]
    assert _final_value(history, None, "val_loss") == 1.0
    assert _final_value(history, {"val_loss": 2.0}, "val_loss") == 2.0
    with pytest.raises(ModelError, match="'loss'.*metric.*valid"):
        _final_value(history, {"val_loss": 2.0}, "loss")


def test_what_is_no_number_is_no_result(tmp_path: Path) -> None:
    _, study = open_study(tmp_path)
    draw(study, math.nan, math.inf, 3.0)
    assert [one.state.name for one in study.trials()] == ["FAIL", "FAIL", "COMPLETE"]
    error = study.trials()[0].user_attrs["error"]
    assert "nan" in error


def test_a_function_may_prune_and_must_give_what_can_be_kept(tmp_path: Path) -> None:
    def prune(trial: optuna.Trial) -> dict[str, Any]:
        raise optuna.TrialPruned

    def give(params: dict[str, Any], trial: optuna.Trial) -> dict[str, Any]:
        return params

    _, study = open_study(tmp_path)
    assert study.ask(prune) is None
    wrong: list[tuple[Any, str]] = [((1, 2), r"\(1, 2\)"), ({0: 1}, "{0: 1}"), (math.nan, "nan")]
    wrong += [(math.inf, "inf"), ([1, {"x": -math.inf}], "")]
    for value, told in wrong:
        with pytest.raises(InvalidInputError, match=f"'layers'.*JSON.*{told}"):
            study.ask(partial(give, {"layers": value}))
    with pytest.raises(InvalidInputError, match="dict"):
        study.ask(lambda trial: suggest(lambda _: [1], trial))  # type: ignore[arg-type,return-value]
    assert [one.state.name for one in study.trials()] == ["PRUNED"]


def test_a_function_that_fails_is_named_and_its_trial_does_not_count(tmp_path: Path) -> None:
    def broken(trial: optuna.Trial) -> dict[str, Any]:
        raise KeyError("units")

    _, study = open_study(tmp_path)
    with pytest.raises(InvalidInputError, match=r"trial 0\b.*KeyError: 'units'"):
        ask(study, broken)
    draw(study, 1.0)
    failed = study.ask(lambda trial: suggest(SPACE, trial))
    assert failed is not None
    study.fail(failed[0], "its own fault")
    assert [(one.number, one.state.name) for one in study.trials()] == [
        (1, "COMPLETE"),
        (2, "FAIL"),
    ]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_refused_call_leaves_the_draws_as_they_are(tmp_path: Path, sampler: str) -> None:
    def refuse(trial: optuna.Trial) -> dict[str, Any]:
        SPACE["lr"].suggest(trial, "lr")
        raise InvalidInputError("batch_size must be a whole number")

    def leave(trial: optuna.Trial) -> dict[str, Any]:
        raise SystemExit  # as a driver that ends while it draws

    expected = draw(open_study(tmp_path / "a", sampler=sampler)[1], 1.0, 2.0, 3.0)
    _, study = open_study(tmp_path / "b", sampler=sampler)
    found = draw(study, 1.0)
    for wrong, error in ((refuse, InvalidInputError), (leave, SystemExit)):
        with pytest.raises(error):
            study.ask(wrong)
    found += draw(study, 2.0, 3.0)
    assert found == expected
    assert [(one.number, one.state.name) for one in study.trials()] == [
        (number, "COMPLETE") for number in (0, 3, 4)
    ]


def test_a_trial_that_was_left_before_it_had_parameters_draws_its_own(tmp_path: Path) -> None:
    expected = draw(open_study(tmp_path / "a")[1], 1.0, 2.0)
    _, study = open_study(tmp_path / "b")
    found = draw(study, 1.0)
    study._study.ask()  # as a driver that is killed before it has drawn
    assert study.take_up() == 1
    assert [*found, *draw(study, 2.0)] == expected


def test_a_function_that_chooses_from_other_ranges_is_another_search(tmp_path: Path) -> None:
    def of(low: float, high: float, **more: Any) -> Space:
        return lambda trial: {"lr": trial.suggest_float("lr", low, high), **more}

    ask(open_study(tmp_path)[1], of(0.1, 0.2))
    with pytest.raises(RunDirectoryError, match="'lr'.*high=0.2"):
        ask(open_study(tmp_path)[1], of(1e-5, 2e-5, units=3))
    ask(open_study(tmp_path)[1], of(0.1, 0.2, units=3))
    # Ranges that depend on another choice differ within a call, too.
    _, study = open_study(tmp_path / "several")
    ask(study, of(0.1, 0.2))
    ask(study, of(0.1, 0.3))
    ask(open_study(tmp_path / "several")[1], of(0.1, 0.4))


def test_what_an_earlier_study_has_left_is_not_taken_for_results(tmp_path: Path) -> None:
    directory, study = open_study(tmp_path)
    check_whole(directory)
    draw(study, 1.0)
    check_whole(directory)
    record, journal = tmp_path / "study.json", tmp_path / "journal.log"
    kept = {path: path.read_bytes() for path in (record, journal)}
    record.unlink()
    with pytest.raises(RunDirectoryError, match="journal.log.*study.json"):
        check_whole(directory)
    (tmp_path / "trials" / "trial-00000").mkdir(parents=True)
    journal.unlink()
    with pytest.raises(RunDirectoryError, match="trials.*study.json"):
        check_whole(directory)
    record.write_bytes(kept[record])
    with pytest.raises(RunDirectoryError, match="study.json.*trials.*journal.log"):
        check_whole(directory)
    place = directory.trial(0).location
    _check_trial_run(
        {"lr": 0.1, "class_weight": {"0": 1.0}}, {"lr": 0.1, "class_weight": {"0": 1.0}}, place
    )
    with pytest.raises(RunDirectoryError, match="parameters.*0.1"):
        _check_trial_run({"lr": 0.1}, {"lr": 0.2}, place)


def test_classes_are_numbers_again(tmp_path: Path) -> None:
    directory, study = open_study(tmp_path)
    params = checked_params({"class_weight": {0: 1, 1: 2.5}}, {})
    asked = study.ask(lambda trial: params)
    assert asked is not None
    study.finish(asked[0], 1.0)
    line = trial_line(study.trials()[0], directory, searching=False)
    assert line.params == {"class_weight": {0: 1.0, 1: 2.5}}


def test_numbers_of_numpy_are_chosen_as_python_s() -> None:
    values = choice(np.int64(2), np.float32(0.5), "a").values
    assert values == (2, 0.5, "a")
    assert [type(one) for one in values] == [int, float, str]


def test_damaged_and_newer_studies_are_named(tmp_path: Path) -> None:
    directory, study = open_study(tmp_path)
    draw(study, 1.0, 2.0)
    with pytest.raises(RunDirectoryError, match="metric.*'loss'.*'mae'"):
        check_same(directory, {"metric": "mae"})
    lines = (tmp_path / "journal.log").read_text().splitlines()
    (tmp_path / "journal.log").write_text("\n".join([lines[0], "no JSON", *lines[1:], ""]))
    with pytest.raises(RunDirectoryError, match="journal.log"):
        Study(directory, "min")
    wrong: tuple[object, ...] = ({"format": float("inf")}, {}, [], {"format": "1"})
    for damaged in wrong:
        (tmp_path / "study.json").write_text(json.dumps(damaged))
        with pytest.raises(RunDirectoryError, match=r"study\.json"):
            directory.read_record()
    (tmp_path / "study.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(RunDirectoryError, match=r"format.*\b99\b.*\b1"):
        directory.read_record()
    with pytest.raises(RunDirectoryError, match="file system"):
        StudyDirectory(Location("s3://bucket/study"))


def test_show_tells_of_trials_that_have_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, study = open_study(tmp_path)
    draw(study, 1.5)
    failed = study.ask(lambda trial: suggest(SPACE, trial))
    left = study.ask(lambda trial: suggest(SPACE, trial))
    assert failed is not None
    assert left is not None
    failed[0].report(math.nan, 1)
    study.fail(failed[0], "KeyError: no such layer\nTraceback")
    left[0].report(0.25, 1)
    command.show_command(argparse.Namespace(study_dir=str(tmp_path), json=False))
    shown = capsys.readouterr().out
    assert "state   nobody is searching\n" in shown
    assert "trials  3: 1 finished, 1 failed, 1 interrupted\n" in shown
    assert "failed  trial 1: KeyError: no such layer\n" in shown + "\n"
    assert "interrupted  0.25" in shown
    command.show_command(argparse.Namespace(study_dir=str(tmp_path), json=True))
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [one["value"] for one in told["trials"]] == [1.5, None, 0.25]


@pytest.mark.parametrize("name", ["median", "asha", "hyperband"])
def test_pruners_end_what_does_worse_than_others(tmp_path: Path, name: str) -> None:
    epochs = 9
    _, study = open_study(tmp_path, pruner=make_pruner(name, epochs), sampler="random")
    pruned = []
    for level in [3.0, 1.0, 4.0, 2.0, 5.0] * 4:
        asked = study.ask(lambda trial: suggest(SPACE, trial))
        assert asked is not None
        trial = asked[0]
        for epoch in range(1, epochs):
            trial.report(level, epoch)
            if trial.should_prune():
                study.prune(trial)
                pruned.append(level)
                break
        else:
            study.finish(trial, level)
    assert pruned
    assert sum(pruned) / len(pruned) > 3.0
    best = study.best()
    assert best is not None
    assert best.value == 1.0


@pytest.mark.parametrize("kind", ["link", "device", "pipe"])
def test_a_journal_that_is_no_ordinary_file_is_refused(tmp_path: Path, kind: str) -> None:
    journal, elsewhere = tmp_path / "study" / "journal.log", tmp_path / "elsewhere"
    journal.parent.mkdir()
    elsewhere.write_text("theirs")
    if kind == "pipe":
        os.mkfifo(journal)
    else:
        journal.symlink_to("/dev/zero" if kind == "device" else elsewhere)
    directory = StudyDirectory(Location(str(journal.parent)))
    for read in (directory.mend_journal, lambda: Study(directory)):
        with pytest.raises(RunDirectoryError, match=str(journal)):
            read()
    assert elsewhere.read_text() == "theirs"
