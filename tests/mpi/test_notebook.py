"""A training in a real notebook kernel: the bar, the result, and an interrupted cell."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

SESSION = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from horovod_spark_runner import run_training

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
df = spark.range(4096).selectExpr("array(float(id / 64)) as features", "float(id % 7) as label")

def model_fn():
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model

def train(epochs):
    return run_training(
        df, model_fn, num_workers=2, epochs=epochs, batch_size=8, run_dir={run_dir!r}
    )
"""


class Kernel:
    """A kernel, as a notebook's front end talks to it."""

    def __init__(self) -> None:
        manager = pytest.importorskip("jupyter_client.manager")
        self._manager, self._client = manager.start_new_kernel(kernel_name="python3")

    def run(self, code: str, during: Callable[[str], None] = lambda text: None) -> Any:
        """Run a cell; return its outputs' messages, and the reply.

        Args:
            code: the cell.
            during: is given each text that is printed.
        """
        outputs: list[dict[str, Any]] = []

        def take(message: dict[str, Any]) -> None:
            outputs.append(message)
            if message["msg_type"] == "stream":
                during(message["content"]["text"])
            elif message["msg_type"] == "comm_msg":
                state = message["content"]["data"].get("state", {})
                during(value_of(state))

        reply = self._client.execute_interactive(
            code, timeout=300, output_hook=take, allow_stdin=False
        )
        return outputs, reply["content"]

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def end(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    kernel = Kernel()
    yield kernel
    kernel.end()


def value_of(state: dict[str, Any]) -> str:
    return str(state.get("value", "")).replace("\u2007", " ")


def texts(outputs: list[dict[str, Any]]) -> str:
    return "".join(
        output["content"]["text"] for output in outputs if output["msg_type"] == "stream"
    )


def test_a_training_in_a_notebook(kernel: Kernel, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    _, reply = kernel.run(SESSION.format(run_dir=run_dir))
    assert reply["status"] == "ok", reply
    outputs, reply = kernel.run("model = train(2)\nmodel")
    assert reply["status"] == "ok", reply
    shown = texts(outputs)
    assert f"new run in {run_dir}" in shown
    assert re.search(r"finished in .*weights: epoch 2, the last", shown)
    assert "preparing the data" not in shown, "the bar shows it"
    assert not re.search(r"epoch 1/2  \d+ steps", shown)
    assert "[Stage" not in shown
    assert "Warning" not in shown
    widgets = [one for one in outputs if one["msg_type"] == "comm_open"]
    bars = [one["content"]["data"]["state"] for one in widgets]
    values = [
        value_of(one["content"]["data"].get("state", {}))
        for one in outputs
        if one["msg_type"] == "comm_msg"
    ] + [value_of(state) for state in bars]
    assert any("epoch 2/2" in value for value in values), values
    (result,) = [one for one in outputs if one["msg_type"] == "execute_result"]
    html = result["content"]["data"]["text/html"]
    assert run_dir in html
    assert "<svg" in html

    interrupted: list[float] = []

    def interrupt(text: str) -> None:
        if "epoch 4/500" in text and not interrupted:
            interrupted.append(time.monotonic())
            kernel.interrupt()

    outputs, reply = kernel.run("train(500)", interrupt)
    assert reply["status"] == "error", reply
    assert reply["ename"] == "KeyboardInterrupt"
    assert run_dir in reply["evalue"]
    match = re.search(r"step-0*(\d+) is saved, epochs? (\d+)", reply["evalue"])
    assert match, reply["evalue"]
    assert int(match[2]) >= 4
    outputs, reply = kernel.run(f"train({match[2]})")
    assert reply["status"] == "ok", reply
    assert f"from step-{int(match[1]):08}" in texts(outputs)
