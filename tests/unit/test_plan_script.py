"""Scripts that are planned: what is no script to plan is told of; nothing is ever trained."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import InvalidInputError, RunCancelledError
from horovod_spark_runner.commands.cli import main
from horovod_spark_runner.planning import script as planned
from horovod_spark_runner.planning.asked import Asked
from horovod_spark_runner.planning.call import plan_of
from horovod_spark_runner.planning.plan import TrainingPlan
from tests.report.runs import leave_run
from tests.unit.test_plan import measurement, workload

IMPORTS = """\
from horovod_spark_runner import HorovodRunner, run_training
from horovod_spark_runner.tune import tune
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print('hello')", "has ended without a training; a script is planned that calls run_trai"),
        ("x = 1\nraise KeyError('no column')", "line 2, in <module>\n    raise KeyError('no col"),
        ("x = (", "has failed before a training:\n"),
        ("import sys; sys.exit(3)", "has ended by sys.exit(3) before a training; arguments for it"),
        (f"{IMPORTS}HorovodRunner(num_workers=2).run(print)", "the script would run print, of whi"),
        (f"{IMPORTS}tune(None, print, {{}}, metric='loss')", "the script would run tune, of which"),
        # What the script makes of it does not count, and nothing is trained after it, nor beside.
        (
            f"{IMPORTS}from multiprocessing.pool import ThreadPool\n"
            "try:\n    HorovodRunner().run(print)\nexcept Exception:\n"
            "    with ThreadPool(1) as pool:\n        pool.map(HorovodRunner().run, [input])",
            "the script would run print, of whi",
        ),
        (f"{IMPORTS}run_training(None, print, run_dir='x')", "must be a Spark DataFrame, or the"),
        (
            f"{IMPORTS}def train():\n    run_training(None, print, batch_size='32')\ntrain()",
            "train.py, line 4: batch_size must be a whole number of at least 1, got '32'\n",
        ),
    ],
)
def test_what_cannot_be_planned_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    before = list(sys.argv), list(sys.path)
    assert main(["plan", str(script)]) == 1
    shown = capsys.readouterr()
    assert words in shown.err
    assert not shown.out, "what a script prints is no part of the plan"
    assert "runpy" not in shown.err
    assert "settings/" not in shown.err, "no traceback of what has found a mistake"
    assert before == (sys.argv, sys.path)


def test_a_mistake_in_what_a_script_calls_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    helper, script = tmp_path / "its_helper.py", tmp_path / "train-1.2"
    helper.write_text(f"{IMPORTS}def train():\n    run_training(None, print, epochs=0)")
    script.write_text("\nfrom its_helper import train\ntrain()")
    assert main(["plan", str(script)]) == 1
    assert f"{script}, line 3, in {helper}, line 4: epochs must be" in capsys.readouterr().err


def test_a_script_is_run_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    script = tmp_path / "train.py"
    script.write_text("import sys, beside\nassert False, [__name__, beside.NAME, *sys.argv[1:]]")
    assert main(["plan", str(script), "--ranks", "2", "--", "--ranks", "a b", "--"]) == 1
    told = "AssertionError: ['__main__', 'beside', '--ranks', 'a b', '--']"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nothing.py"], "there is no script nothing.py"),
        (["some.ipynb"], "is a notebook; call plan_training in it"),
        (["{here}/plan.json"], "plan.json is neither a Python script (.py) nor the directory of a"),
        (["runs/x", "--sample-rows", "5"], "--sample-rows: a plan from a run measures nothing"),
        (["runs/x", "--noise-scale", "--plan-dir", "y"], "--noise-scale, --plan-dir: a plan from"),
        (["runs/x", "--", "--epochs", "3"], "arguments after --: a plan from a run"),
        (["runs/x", "--ranks", "two"], "--ranks must be whole numbers with commas"),
        (["runs/x", "--ranks", ""], "--ranks must be whole numbers with commas"),
        (["runs/x", "--ranks", "0"], "ranks[0] must be a whole number of at least 1"),
        (["runs/x", "--network", "fast"], "a network is a speed such as"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert main(["plan", *(each.format(here=tmp_path) for each in given)]) == 1
    assert words in capsys.readouterr().err


def test_one_way_of_showing_a_plan_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "runs/x", "--json", "--output", "plan.html"])
    assert "not allowed with argument --json" in capsys.readouterr().err


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("horovod_spark_runner.commands.plan.script_of", interrupted)
    assert main(["plan", "runs/x"]) == 130
    assert capsys.readouterr().err == "horovod-spark-runner: interrupted\n"


class Measuring:
    """Stands for Spark and the ranks, of which there is nothing to see here: notes what comes.

    Attributes:
        places: where each plan was to go.
        begun: is set when one is being measured.
        go_on: is waited for by it.
        at_once: the most that were measured at once.
        fails: what it raises, if anything.
        threads: those of the script, which are waited for in the end.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.at_once = self._now = 0
        self.fails: Exception | None = None
        self.threads: list[threading.Thread] = []
        self.go_on.set()

    def __call__(self, request: Any, asked: Asked, place: str) -> TrainingPlan:
        self._now += 1
        self.at_once = max(self.at_once, self._now)
        self.places.append(place)
        self.begun.set()
        assert self.go_on.wait(20)
        time.sleep(0.02)  # for another to come, if it is let in
        self._now -= 1
        if self.fails is not None:
            raise self.fails
        plan = plan_of("it", measurement(workload()), asked)
        Path(place).mkdir(parents=True, exist_ok=True)
        plan.write(Path(place, "plan.json"))
        return plan


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measuring]:
    """What is measured, which a script has as ``beside.measuring``; it trains ``beside.frame``."""
    measuring = Measuring()
    beside = types.ModuleType("beside")
    frame = types.SimpleNamespace(sparkSession=object())
    beside.__dict__.update(measuring=measuring, frame=frame)
    monkeypatch.setitem(sys.modules, "beside", beside)
    monkeypatch.setattr(planned, "plan_request", measuring)
    monkeypatch.setattr("horovod_spark_runner.run.default_place.runs_on_this_machine", bool)
    yield measuring
    measuring.go_on.set()
    for thread in measuring.threads:
        thread.join(20)


BESIDE = """\
import os, threading
from concurrent.futures import ThreadPoolExecutor
from beside import frame, measuring
from horovod_spark_runner import run_training

def train(run_dir=None):
    run_training(frame, print, run_dir=run_dir)

"""


def test_no_training_begins_after_a_script_either(tmp_path: Path, measuring: Measuring) -> None:
    """Threads outlive the main code of a script: Python waits for them at its end only."""
    script = tmp_path / "train.py"
    script.write_text(f"""{BESIDE}
later, ended = threading.Event(), []

def late():
    assert later.wait(20)
    try:
        train()
    except BaseException as error:
        ended.append(error)

measuring.later, measuring.ended = later, ended
measuring.threads = [threading.Thread(target=late, name="the last")]
measuring.threads[0].start()
""")
    with pytest.raises(InvalidInputError, match=r"has ended without.*go on \(the last\), whose tr"):
        planned.plan_script(script, [], Asked())
    measuring.later.set()  # type: ignore[attr-defined]
    measuring.threads[0].join(20)
    (ended,) = measuring.ended  # type: ignore[attr-defined]
    assert isinstance(ended, RunCancelledError)
    assert "the script is only planned: nothing is trained" in str(ended)
    assert not measuring.places


def test_one_training_is_measured_at_a_time(tmp_path: Path, measuring: Measuring) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"""{BESIDE}
from multiprocessing.pool import ThreadPool
with ThreadPool(3) as pool:
    pool.map(train, ["one", "two", "three"], chunksize=1)
""")
    planned.plan_script(script, [], Asked(), str(tmp_path / "plan"))
    assert (measuring.places, measuring.at_once) == ([str(tmp_path / "plan")], 1)


def test_what_a_thread_still_measures_is_waited_for(tmp_path: Path, measuring: Measuring) -> None:
    """Here of a pool that is not shut down, whose idle threads never end by themselves."""
    measuring.go_on.clear()
    script = tmp_path / "train.py"
    script.write_text(f"""{BESIDE}
pool = ThreadPoolExecutor(2)
pool.submit(train)
assert measuring.begun.wait(20)
threading.Timer(0.05, measuring.go_on.set).start()
""")
    plan = planned.plan_script(script, [], Asked(), str(tmp_path / "plan"))
    assert plan.name == "it"


def test_what_fails_is_not_measured_again(tmp_path: Path, measuring: Measuring) -> None:
    """Whatever it is: Spark and storage have errors of their own."""
    script = tmp_path / "train.py"
    script.write_text(f"""{BESIDE}
for i in range(3):
    try:
        train()
    except Exception:
        pass
""")
    measuring.fails = ValueError("Spark has lost it")
    with pytest.raises(InvalidInputError, match=r"would train cannot be measured:[^$]*lost it$"):
        planned.plan_script(script, [], Asked(), str(tmp_path / "plan"))
    assert len(measuring.places) == 1
    measuring.fails = OSError("no space left")
    with pytest.raises(OSError, match="no space left"):
        planned.plan_script(script, [], Asked(), str(tmp_path / "plan"))
    assert len(measuring.places) == 2


def test_places_are_those_of_the_command(
    tmp_path: Path, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "train.py"
    script.write_text(f"{BESIDE}\nos.chdir('elsewhere')\ntrain()\n")
    assert main(["plan", str(script), "--plan-dir", "here", "--output", "new/it.json"]) == 0
    assert json.loads((tmp_path / "new" / "it.json").read_text())["name"] == "it"
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(script)]) == 0
    for wrong in ("it.txt", "it", "elsewhere"):  # told before minutes of measuring
        monkeypatch.chdir(tmp_path)
        assert main(["plan", str(script), "--output", wrong]) == 1
    named, new = measuring.places
    assert named == str(tmp_path / "here")
    assert Path(new).parent == tmp_path / "plans"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_that_is_there_is_left_as_it_is(
    tmp_path: Path, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the script's ``run_dir`` holds one already, the plan goes elsewhere."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    leave_run(run, 3)

    def contents() -> dict[str, Any]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
            for path in [run, *run.rglob("*")]
        }

    before = contents()
    script = tmp_path / "train.py"
    script.write_text(f"{BESIDE}\ntrain({str(run)!r})\n")
    assert main(["plan", str(script)]) == 0
    assert main(["plan", str(script), "--plan-dir", "given"]) == 0
    assert contents() == before
    new, given = measuring.places
    assert Path(new).parent == tmp_path / "plans"
    assert given == str(tmp_path / "given")
    # One that holds none has the plan.
    script.write_text(f"{BESIDE}\ntrain({str(tmp_path / 'next')!r})\n")
    assert main(["plan", str(script)]) == 0
    assert measuring.places[-1] == str(tmp_path / "next")


AFTER = f"""{IMPORTS}
import atexit, os, pickle, subprocess, sys, threading, types
from horovod_spark_runner.planning import script as planned

def late():
    threading.main_thread().join()
    print("of a thread")
    subprocess.run(["echo", "of a process"])
    os.write(1, b"of a file descriptor\\n")

def measuring(request, asked, place):
    with open(sys.argv[1], "rb") as file:
        return pickle.load(file)

planned.plan_request = measuring
atexit.register(print, "of its end")
threading.Thread(target=late).start()
run_training(types.SimpleNamespace(sparkSession=None), print)
"""


def test_what_a_script_prints_after_its_plan_is_no_part_of_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AFTER)
    measured = plan_of("it", measurement(workload()), Asked())
    (tmp_path / "measured").write_bytes(pickle.dumps(measured))
    command = [sys.executable, "-m", "horovod_spark_runner.commands.cli", "plan", str(script)]
    command += ["--json", "--plan-dir", str(tmp_path), "--", str(tmp_path / "measured")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "it"
    printed = ("of a thread", "of a process", "of a file descriptor", "of its end")
    assert all(words in done.stderr for words in printed)
