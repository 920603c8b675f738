"""Fixtures for all tests. Importing this file starts nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from horovod_spark_runner.frameworks import quiet_imports

from . import java, required, tiers
from .digits import load as load_digits
from .leftovers import MARK, await_nothing_left, forget_shared_memory, inventory
from .preload import PATIENT, build

# A proxy of the machine's is not the way to the tests' own servers.
LOCAL = "localhost,127.0.0.1,::1"

with quiet_imports():  # loads Triton first: tests import TensorFlow, and then PyTorch
    pass

# A machine that is busy with other things is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tiers)
    if os.environ.get("HSR_REQUIRE_ALL"):
        config.pluginmanager.register(required)


def pytest_unconfigure() -> None:
    forget_shared_memory()


@pytest.fixture(scope="session", autouse=True)
def marked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Mark what the tests start, and give it a temporary folder and settings of its own.

    Ranks that wait for others, which start, save or are held by a fault, leave their core to them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a script has put behind
        signal.signal(signal.SIGINT, signal.default_int_handler)
    patient = build(PATIENT, tmp_path_factory.getbasetemp())  # stays where it is, to be looked at
    uses_spark = any(item.get_closest_marker("spark") for item in request.session.items)
    options = java.options() if uses_spark else java.FAST
    folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # short: it holds sockets
    os.environ.update({MARK: uuid.uuid4().hex, "TMPDIR": folder, "JDK_JAVA_OPTIONS": options})
    os.environ.update({"NO_PROXY": LOCAL, "no_proxy": LOCAL})
    if uses_spark and patient is not None:
        os.environ["LD_PRELOAD"] = str(patient)
    tempfile.tempdir = None  # this process's, too
    yield
    tempfile.tempdir = None
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def nothing_stays(marked: None) -> Iterator[None]:
    """Fail if the tests of a file leave behind what was not there before them."""
    before = inventory()
    yield
    await_nothing_left(30, before=before)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test an environment without settings of the machine's own."""
    for name in list(os.environ):
        if name.startswith(("PYSPARK_", "SPARK_", "HOROVOD_", "OMPI_", "PMIX_", "HSR_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def spark(marked: None) -> Iterator[Any]:
    """A local Spark session with four cores, more than the machine may have."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[4]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        # Workers that need not import TensorFlow, each again.
        .config("spark.python.daemon.module", "tests.python_daemon")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    # As the package has it from its first job on: one daemon of Python workers, and not a second.
    session.sparkContext.pythonExec = sys.executable
    yield session
    session.stop()


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's 1,797 handwritten digits: images of 8×8 in 0…1, and labels."""
    return load_digits()


@pytest.fixture(scope="session")
def digits_df(spark: Any, digits: tuple[np.ndarray, np.ndarray]) -> Any:
    """The digits as a DataFrame: ``image`` (array of 64), ``digit``, ``id``."""
    images, labels = digits
    rows = [
        (number, image.tolist(), int(label))
        for number, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    return spark.createDataFrame(rows, "id int, image array<float>, digit int").repartition(3)


@pytest.fixture(scope="session")
def python() -> str:
    return sys.executable
