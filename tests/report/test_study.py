"""The page of a study: what it shows, and how it looks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.tune import choice, integer, loguniform
from horovod_spark_runner.tune.directory import StudyDirectory
from horovod_spark_runner.tune.page import StudyFacts, study_page
from horovod_spark_runner.tune.reporting import PageWriter, study_facts
from horovod_spark_runner.tune.samplers import make_pruner, sampler_for
from horovod_spark_runner.tune.space import Space, suggest
from horovod_spark_runner.tune.study import Study

from .browser import DESKTOP, PHONE, Browser

SPACE: Space = {
    "learning_rate": loguniform(1e-5, 1.0),
    "units": integer(4, 128, log=True),
    "activation": choice("relu", "tanh", None),
    "a parameter with a name that is long": integer(1, 3),
}
RECORD = {"format": 1, "metric": "val_loss", "direction": "min", "seed": 3}
RECORD_MORE = {**RECORD, "space": {"lr": "…"}, "settings": {"fit": {"epochs": 9}}}


def searched(folder: Path, trials: int, space: Space = SPACE) -> Callable[[bool], StudyFacts]:
    """Return what tells of a study of which some are pruned, some fail, and one is running."""
    directory = StudyDirectory(Location(folder))
    directory.location.make_folder()
    pruner = make_pruner("median", 9)
    choosing = lambda number: sampler_for("random", space, 1, number, side_by_side=False)  # noqa: E731
    study = Study(directory, "min", choosing, pruner)
    for number in range(trials):
        asked = study.ask(lambda trial: suggest(space, trial))
        assert asked is not None
        trial, params = asked
        if number % 9 == 4:
            trial.report(math.nan, 1)
            study.fail(trial, "RankFailedError: <b>no</b> such layer\nTraceback")
            continue
        level = abs(math.log10(params["learning_rate"]) + 3) + 0.01 * params.get("units", 4)
        for epoch in range(1, 10):
            trial.report(level * (1 + 2 / epoch), epoch)
            if trial.should_prune():
                study.prune(trial)
                break
        else:
            study.finish(trial, level * (1 + 2 / 9), 1.5)
    if trials:
        study.ask(lambda trial: suggest(space, trial))
    return lambda searching: study_facts(study, directory, RECORD_MORE, searching=searching)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> StudyFacts:
    return searched(tmp_path_factory.mktemp("study"), 40)(True)


@pytest.mark.parametrize(("width", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_a_study_can_be_read(browser: Browser, facts: StudyFacts, width: int, dark: bool) -> None:
    seen = browser.look(study_page(facts), width=width, dark=dark)
    seen.check()
    assert seen.headings == [
        "Best parameters",
        "History",
        "Parameters",
        "Epoch by epoch",
        "Trials",
        "What was searched",
    ]
    best = facts.ranked[0]
    assert best.trial == facts.best
    assert best.run_dir in seen.text
    assert "the search goes on" in seen.text
    assert "RankFailedError: <b>no</b> such layer" in seen.text
    assert "1 running" in seen.text
    assert seen.charts >= 6


def test_what_matters_comes_first(facts: StudyFacts) -> None:
    assert next(iter(facts.importances)) == "learning_rate"
    assert facts.importances["learning_rate"] > 0.5
    assert sum(facts.importances.values()) == pytest.approx(1.0)
    assert facts.names[0] == "learning_rate"
    assert facts.log == {"learning_rate", "units"}
    text = study_page(facts)
    for line in facts.trials:
        assert f'<td class="n">{line.trial}</td>' in text
    pruned = [line for line in facts.trials if line.state == "pruned"]
    assert pruned
    assert f"{pruned[-1].trial} pruned" in text


@pytest.mark.parametrize("trials", [0, 1, 5])
def test_a_study_that_has_just_begun_has_a_page(tmp_path: Path, trials: int) -> None:
    found = searched(tmp_path / "s", trials)(False)
    text = study_page(found)
    assert "nobody is searching" in text
    assert ("Best parameters" in text) == (trials > 0)


def test_parameters_may_differ_from_trial_to_trial(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        layers = trial.suggest_int("layers", 1, 2)
        units = [trial.suggest_int(f"units_{n}", 2, 16) for n in range(layers)]
        more = {"dropout": trial.suggest_float("dropout", 0.0, 0.5)} if layers == 2 else {}
        return {"layers": units, "learning_rate": trial.suggest_float("r", 1e-4, 1e-1), **more}

    directory = tmp_path / "s"
    text = study_page(searched(directory, 12, space)(True))
    assert "dropout" in text
    assert "Together" in text


def test_the_page_is_written_when_there_is_news_and_in_the_end(tmp_path: Path) -> None:
    read = searched(tmp_path / "s", 3)
    place = Location(tmp_path / "report.html")
    with PageWriter(place, read) as page:
        page.tell()
        for _ in range(1000):
            if place.exists():
                break
            page._thread.join(0.01)
        assert "the search goes on" in place.read_text()
    assert "nobody is searching" in place.read_text()


def test_a_page_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    place = Location(tmp_path / "file" / "report.html")
    with PageWriter(place, searched(tmp_path / "s", 1)) as page:
        page._write(searching=True)
    assert [one.levelname for one in caplog.records] == ["WARNING"]
