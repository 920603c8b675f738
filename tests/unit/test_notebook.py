"""Progress and results in a notebook."""

from __future__ import annotations

import io
import math
import re
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.cluster.protocol.messages import (
    Envelope,
    Log,
    Notice,
    Placed,
    Progress,
    from_driver,
)
from horovod_spark_runner.cluster.protocol.topology import RankPlacement
from horovod_spark_runner.model.load import TrainingSummary
from horovod_spark_runner.observe import console as showing
from horovod_spark_runner.observe.console import Console
from horovod_spark_runner.observe.notebook import bar_class, in_notebook


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like a kernel that has no ipywidgets."""
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)


def progress(epoch: int, step: int) -> Envelope:
    return Envelope(0, 0, "h", Progress(epoch, 2, step, 5, 5 * epoch + step, {"loss": 0.25}))


def train(console: Console) -> None:
    """Show a run with everything that there is."""
    console.report("checking the configuration")
    console.print("new run in runs/digits")
    console.report("preparing the data")
    console.on_message(from_driver(Notice("starting 2 ranks", warn=False)))
    console.on_message(from_driver(Placed(2, "h: ranks 0, 1 (CPU)")))
    console.report("building the model")
    for epoch in range(2):
        for step in (1, 3, 5):
            console.on_message(progress(epoch, step))
    console.on_message(Envelope(0, 1, "h", Log(("printed",))))
    console.print("finished in 3 s")
    console.close()


def test_a_notebook_is_known_by_its_kernel(notebook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_notebook()
    shell = types.SimpleNamespace()  # IPython in a terminal
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()
    assert "IPython" not in sys.modules


def test_few_lines_and_a_bar_without_ipywidgets(notebook: None) -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Console("run 1", stream))
    written = stream.getvalue()
    lines = [
        re.sub(r"\x1b\[\d*[A-Zm]", "", line).rpartition("\r")[2] for line in written.split("\n")
    ]
    assert [line.strip() for line in lines if line.strip()] == [
        "new run in runs/digits",
        "2 ranks on h: ranks 0, 1 (CPU)",
        "[1/h] printed",
        "finished in 3 s",
    ]
    bars = written.split("\r")
    for text in ("checking", "preparing", "starting", "building", "epoch 1/2", "epoch 2/2"):
        assert any(text in bar for bar in bars)
    assert not re.search(r"-[\d.]+step/s", written)
    assert any("epoch 2/2" in bar and "5/5" in bar and "loss 0.25" in bar for bar in bars)


def test_one_bar_is_rewritten(notebook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class Bar(bar_class()):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            opened.append(self)
            self.is_open = True

        def close(self) -> None:
            super().close()
            self.is_open = False

    monkeypatch.setattr(showing, "bar_class", lambda: Bar)
    console = Console("run 1", io.StringIO(), task="starting the ranks")
    train(console)
    (bar,) = opened
    assert (bar.is_open, bar.n, bar.total) == (False, 5, 5)
    assert bar.desc.startswith("epoch 2/2")
    # A function on the ranks shows itself what it does.
    console = Console("run 2", io.StringIO())
    console.on_message(from_driver(Notice("starting 2 ranks", warn=False)))
    console.on_message(from_driver(Placed(2, "h: ranks 0, 1 (CPU)")))
    assert [bar.is_open for bar in opened] == [False, False]
    console.close()


def test_a_long_activity_after_the_epochs_takes_their_bar(
    notebook: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    console = Console("run 1", stream := io.StringIO(), clock=lambda: now)
    console.on_message(progress(1, 5))
    console.poll()
    assert "saving" not in stream.getvalue()
    now = 2.5
    console.poll()
    assert "saving the model" in stream.getvalue()
    console.close()


HISTORY = [{"loss": 0.5 / n, "val_loss": 1.0 / n, "<f1>": [1.0, 2.0]} for n in range(1, 41)]


def test_a_summary_as_html(tmp_path: Path) -> None:
    placement = tuple(RankPlacement(n, n, "node<7>", 0, n) for n in range(2))
    run_dir = str(tmp_path / "gone & <away>")
    summary = TrainingSummary(run_dir, HISTORY, placement, {"total": 61.0}, weights="the best")
    text = summary._repr_html_()
    for part in (
        "1 min 1 s",
        "2 on node&lt;7&gt;",
        "gone &amp; &lt;away&gt;/report.html",
        "the best",
    ):
        assert part in text
    assert "<f1>" not in text
    assert text.count("<polyline") == 2
    assert not re.search(r"<script|<link|<img|https?:|url\(|color:|(fill|stroke)=\"#", text)
    rows = re.findall(r"<tr><td>(\S+?)</td>", text)
    assert rows == ["1", "2", "3", "4", "5", "…", *map(str, range(26, 41))]
    # The first and the best loss, from the top to the bottom of the curve.
    points = re.findall(r'points="([^"]+)"', text)[0].split()
    assert len(points) == 40
    heights = [float(point.partition(",")[2]) for point in points]
    assert heights == sorted(heights)


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"loss": math.nan}, {"loss": math.inf}],
        [{"loss": 1.0}, {"loss": 1.0}],
        [{}, {"a": None}],
    ],
)
def test_histories_without_a_curve(history: list[dict[str, Any]]) -> None:
    text = TrainingSummary("runs/digits", history)._repr_html_()
    assert text.startswith("<div>")
    assert "runs/digits" in text
    assert "nan" not in text.partition("<table>")[0]


def test_a_representation_does_not_fail() -> None:
    broken: Any = 3
    text = TrainingSummary("runs/digits", broken)._repr_html_()
    assert re.fullmatch(r"<pre>&lt;.*TrainingSummary.*&gt;</pre>", text)


@pytest.mark.parametrize("progress_text", ["3 of 8 tasks done", ""])
def test_only_what_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch, progress_text: str) -> None:
    monkeypatch.setattr(showing, "_MOMENT", 0.2)
    monkeypatch.setattr(showing, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(showing, "_REPEAT_SECONDS", 0.3)
    console = Console("", stream := io.StringIO())
    with console.during("evaluating the model", lambda: progress_text):
        pass
    time.sleep(0.3)
    console.poll()
    assert not stream.getvalue()
    with console.during("evaluating the model", lambda: progress_text):
        time.sleep(0.9)
    first, second, *_ = stream.getvalue().splitlines()
    assert first == "evaluating the model"
    details = f"{progress_text}, " if progress_text else ""
    assert re.fullmatch(rf"evaluating the model: {details}0\.\d+ s so far", second)
    quiet = Console("", stream := io.StringIO(), quiet=True)
    with quiet.during("evaluating the model"):
        time.sleep(0.3)
    assert not stream.getvalue()


def test_lines_of_a_titled_run_begin_with_its_name() -> None:
    console = Console("fit-00", stream := io.StringIO(), title="units=8, epochs=2")
    console.print("new run in x")
    console.on_message(progress(0, 5))
    console.close()
    assert [line.partition(": ")[0] for line in stream.getvalue().splitlines()] == [
        "fit-00 (units=8, epochs=2)"
    ] * 2
