"""The errors of docs/troubleshooting.md are those that are raised."""

from __future__ import annotations

import ast
import functools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_spark_runner.cluster.slot.slot_link import _DriverLink
from horovod_spark_runner.errors import LaunchError
from tests.docs.sessions import Interpreter

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "horovod_spark_runner"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^```\n(.+)\n```$", PAGE, flags=re.MULTILINE)
# Characters of a message that must be in one text of the code.
LITERAL = 25
# By Spark, and by a user's code or environment on a rank.
OF_OTHERS = ("JAVA_GATEWAY_EXITED", "No module named 'horovod'", "ValueError: no vocabulary")


def literals_of(node: ast.expr) -> list[str]:
    """Return the literal parts of a string or f-string, in order."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [str(part.value) for part in parts if isinstance(part, ast.Constant)]


@functools.cache
def templates() -> list[list[str]]:
    """Return the literal parts of each longer text in the package's code."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree))
    texts = (literals_of(n) for n in nodes if isinstance(n, (ast.JoinedStr, ast.Constant)))
    return [parts for parts in texts if sum(map(len, parts)) > LITERAL]


def matched(parts: list[str], message: str) -> int:
    """Return how many characters of a message are literal parts of a text, in their order."""
    position = count = 0
    for part in parts:
        found = message.find(part, position)
        if found < 0:
            rest = next((n for n in range(position, len(message)) if part.startswith(message[n:])),
                        len(message))  # fmt: skip
            return count + len(message) - rest
        position, count = found + len(part), count + len(part)
    return count


@pytest.mark.parametrize("message", [m for m in QUOTED if not any(t in m for t in OF_OTHERS)])
def test_a_message_has_a_text_in_the_code(message: str) -> None:
    name, _, text = message.partition(": ")
    assert re.search(rf"^class {name}\b", (PACKAGE / "errors.py").read_text(), re.MULTILINE)
    best = max(matched(parts, text.rstrip("…")) for parts in templates())
    assert best > LITERAL, text


def pattern_of(message: str) -> str:
    """Return the pattern of a quoted message, in which hosts, paths and numbers may differ."""
    varying = {"…": ".*", "node7": r"\S+"}
    tokens = re.split(r"(…|node7|/[\w/.-]*|\d+)", message.rstrip("… "))
    return "".join(
        varying.get(token, r"\S+" if token.startswith("/") else r"[\d.]+")
        if number % 2
        else re.escape(token)
        for number, token in enumerate(tokens)
    )


def quoted(*facts: str) -> list[str]:
    """Return the quoted messages that hold one of these facts."""
    messages = [message for message in QUOTED if any(fact in message for fact in facts)]
    assert len(messages) == len(facts)
    return messages


# What a new user does wrong on one machine.
MISTAKES = """
import os, signal, time, traceback
from pyspark.sql import SparkSession, functions as F
from horovod_spark_runner import *

spark = SparkSession.builder.master("local[2]").getOrCreate()
good = spark.createDataFrame(
    [([float(i), 1.0], float(i % 2), 1.0 if i != 7 else float("nan")) for i in range(64)],
    "features array<float>, label float, b double",
)

def model_fn(units=4, broken=False, custom=False):
    import keras
    if broken:
        raise ValueError("no vocabulary")
    layers = [keras.layers.Input((2,)), keras.layers.Dense(units), keras.layers.Dense(1)]
    if custom:
        layers.insert(1, keras.layers.Lambda(lambda x: x * 2, name="lambda"))
    model = keras.Sequential(layers, name="sequential")
    model.compile("sgd", "mse")
    return model

def scalar_fn():
    import keras
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

def train(df=good, model_fn=model_fn, **settings):
    return run_training(df, model_fn, **{"num_workers": 2, "stream_logs": False, **settings})

def on_rank_1(act):
    def callbacks():
        import keras
        class Acting(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                from mpi4py import MPI
                if MPI.COMM_WORLD.rank == 1:
                    act()
        return [Acting()]
    return callbacks

def show(function, *args, **settings):
    try:
        function(*args, **settings)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "DataError:" in line]
        text = lines[0].rpartition("errors.")[2] if lines else f"{type(error).__name__}: {error}"
        print("raised:", text.splitlines()[0])

lambdas = lambda: model_fn(custom=True)
show(train, num_workers=8)
show(train, feature_cols=["pixels"], label_cols=["label"])
show(train, good.withColumnRenamed("label", "y"))
show(train, good, scalar_fn, feature_cols=["b"], label_cols=["label"])
show(train, good.withColumn("label", F.col("label").cast("string")))
show(train, model_fn=lambda: model_fn(broken=True))
show(train, launch=LaunchOptions(mpi=MpiOptions(network_interface="ib7")))
show(train, callbacks=on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL)))
show(train, callbacks=on_rank_1(lambda: time.sleep(600)), launch=LaunchOptions(stall_timeout=3))
train(run_dir="run")
show(train, run_dir="run", validation=0.2, epochs=2)
show(train, run_dir="run", model_fn=lambda: model_fn(8), epochs=2)
train(model_fn=lambdas, run_dir="lambda")
show(TFTransformer.from_run, "lambda")
nulls = good.withColumn("features", F.when(F.col("label") == 0, F.col("features")))
show(TFTransformer.from_run("run").transform(nulls).collect)
"""


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.spark
def test_mistakes_on_one_machine_raise_the_quoted_errors(tmp_path: Path) -> None:
    script = tmp_path / "mistakes.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{MISTAKES}")
    interpreter = Interpreter(tmp_path)
    try:
        out, _ = interpreter.run(script)
    finally:
        interpreter.end()
    raised = re.findall(r"^raised: (.+)$", out, flags=re.MULTILINE)
    messages = quoted(
        *("asked for 8 slots", "'pixels'", "label_cols is", "NaN", "type string"),
        *("no vocabulary", "ib7", "SIGKILL", "stall_timeout", "other data", "another model"),
        *("lambda", "null in row"),
    )
    assert len(raised) == len(messages)
    for message in messages:
        assert any(re.match(pattern_of(message), line) for line in raised), (message, raised)


def test_a_driver_that_cannot_be_reached() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        link = _DriverLink(unused.getsockname(), b"key", pauses=())
        with pytest.raises(LaunchError) as raised:
            link.check()
    (message,) = quoted("cannot reach the driver")
    assert re.match(pattern_of(message), f"LaunchError: {raised.value}")


# A cluster on which the driver does not see what an executor writes to its disk.
PRIVATE_DISK = 'mount -t tmpfs none "$1" && exec "$2" start "$3" 1 2 1g'
TRAIN = """
import sys
from pyspark.sql import SparkSession
from horovod_spark_runner import run_training
settings = {"spark.executor.memory": "512m", "spark.ui.enabled": "false"}
spark = SparkSession.builder.master(sys.argv[1]).config(map=settings).getOrCreate()
rows = [([float(i)], float(i)) for i in range(64)]
df = spark.createDataFrame(rows, "features array<float>, label float")
try:
    run_training(df, lambda: None, run_dir=sys.argv[2], num_workers=1)
except Exception as error:
    print(f"raised: {type(error).__name__}: {error}")
"""


@pytest.mark.thorough
@pytest.mark.cluster
@pytest.mark.spark
def test_a_run_directory_that_machines_do_not_share(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    standalone, cluster = str(ROOT / "scripts" / "standalone"), str(tmp_path / "cluster")
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode:
        pytest.skip("mounting in a namespace is not allowed here")
    env = {**os.environ, "HSR_VENV": sys.prefix, "PYSPARK_PYTHON": sys.executable}
    command = [*unshare, "sh", "-c", PRIVATE_DISK, "sh", str(disk), standalone, cluster]
    try:
        started = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        job = [sys.executable, "-c", TRAIN, started.stdout.strip(), str(disk / "run")]
        done = subprocess.run(
            job, capture_output=True, text=True, check=False, env=env, timeout=240, cwd=tmp_path
        )
    finally:
        subprocess.run([standalone, "stop", cluster], check=False, env=env)
    (message,) = quoted("the executors wrote")
    assert re.search(f"raised: {pattern_of(message)}", done.stdout), done.stderr[-4000:]
