"""The Spark session, and the differences between classic Spark and Spark Connect."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ...config.launch import LaunchOptions
from ...errors import DataError, EnvironmentProblem, InvalidInputError
from ...machine import repeat_in_thread
from ...storage.filesystem import Location

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_DESCRIPTION = "spark.job.description"
# Conversions to a DataFrame from similar objects, by the module of their class.
_CONVERSIONS = {
    "pyspark.pandas.": "df.to_spark()",
    "pandas.": "spark.createDataFrame(df)",
    "pyspark.core.rdd.": 'rdd.toDF(["column", …])',
}
# Seconds between two pauses of Spark's progress bar, which lasts half a second each.
_BAR_SECONDS = 0.2
_KILL_ON_IDLE = "spark.python.worker.killOnIdleTimeout"
_IDLE_LIMIT = "spark.python.worker.idleTimeoutSeconds"
_MEMORY_LIMIT = "spark.executor.pyspark.memory"
# Spark's settings that encrypt its network traffic.
_ENCRYPTION_SETTINGS = (
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
)


def active_session() -> SparkSession:
    """Return the active Spark session, or create one as ``SparkSession.builder`` would."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def classic_context(spark: SparkSession) -> SparkContext | None:
    """Return the session's ``SparkContext``, or ``None`` on Spark Connect, which has none."""
    return getattr(spark, "_sc", None)


def is_stopped(spark: SparkSession) -> bool:
    """Tell whether the session was stopped; does not query the server of Spark Connect."""
    context = classic_context(spark)
    if context is None:
        return False
    java = getattr(context, "_jsc", None)
    try:
        # Python's flag is set at the end of stop(), Java's at its beginning, when jobs end.
        return java is None or bool(java.sc().isStopped())
    except Exception:  # the JVM has ended, which deserves another message
        return False


def check_is_frame(data: object, wanted: str) -> None:
    """Check that ``data`` is a Spark DataFrame.

    Args:
        data: the argument.
        wanted: requirement, for the message.

    Raises:
        DataError: it is another object; the message says how to convert it.
    """
    if hasattr(data, "sparkSession"):
        return
    kind = f"{type(data).__module__}.{type(data).__qualname__}"
    conversions = (code for module, code in _CONVERSIONS.items() if kind.startswith(module))
    advice = "".join(f"; write {code} in its place" for code in conversions)
    raise DataError(f"{wanted}, got an object of type {kind.removeprefix('builtins.')}{advice}")


def check_running(spark: SparkSession) -> SparkSession:
    """Check that a DataFrame's session is running, and return it.

    Raises:
        InvalidInputError: it was stopped.
    """
    if is_stopped(spark):
        raise InvalidInputError(
            "the DataFrame is of a Spark session that was stopped; read or make it anew in the "
            "session that is running now"
        )
    return spark


@contextlib.contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Describe the jobs that this thread starts inside, in Spark's UI.

    The caller's own description of its jobs comes first. Spark Connect has no descriptions.
    """
    context = classic_context(spark)
    if context is None:
        yield
        return
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, f"{before}: {text}" if before else text)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # Spark was stopped, which the jobs inside report
            context.setLocalProperty(_DESCRIPTION, before)


@contextlib.contextmanager
def mute_console_progress(spark: SparkSession | None) -> Iterator[None]:
    """Keep Spark's own progress bar off the terminal while the block runs.

    Spark reads ``spark.ui.showConsoleProgress`` only when it starts. Its bar pauses for half a
    second after ``finishAll``, which it calls itself at the end of each job.

    Args:
        spark: the session; with ``None``, its bar stays.
    """
    context = None if spark is None else classic_context(spark)
    bar = None
    with contextlib.suppress(Exception):  # an internal interface: without it, the bar stays
        bar = None if context is None else context._jsc.sc().progressBar()
    if bar is None or not bar.isDefined():
        yield
        return

    def pause() -> None:
        with contextlib.suppress(Exception):  # Spark may be stopped meanwhile
            bar.get().finishAll()

    with repeat_in_thread(pause, "hsr-spark-bar", every=_BAR_SECONDS, first=0.0):
        yield


@contextlib.contextmanager
def with_settings(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """Change settings of the session, which all its threads see, while the block runs."""
    before = {name: spark.conf.get(name, None) for name in values}
    try:
        for name, value in values.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def inheriting_thread(
    spark: SparkSession, target: Callable[[], object], name: str
) -> threading.Thread:
    """Return a daemon thread that inherits the caller's Spark properties (pool, group, tags).

    On Spark Connect, these are its tags.
    """
    thread: threading.Thread
    if classic_context(spark) is None:
        tags = tuple(spark.getTags())

        def run() -> None:
            for tag in tags:
                spark.addTag(tag)
            target()

        thread = threading.Thread(target=run, name=name)
    else:
        from pyspark import InheritableThread

        thread = InheritableThread(target=target, name=name)
    thread.daemon = True
    return thread


def master_of(spark: SparkSession) -> str:
    """Return Spark's master URL."""
    return str(spark.conf.get("spark.master", "") or "")


def connect_host(spark: SparkSession) -> str | None:
    """Return the host of the Spark Connect server, or ``None`` for a classic session."""
    client = getattr(spark, "client", None) if classic_context(spark) is None else None
    return None if client is None else str(client.host)


def application_of(spark: SparkSession) -> str:
    """Return the identity of the Spark application, whose sessions share its slots."""
    context = classic_context(spark)
    return f"connect:{connect_host(spark)}" if context is None else str(context.applicationId)


def runs_on_this_machine(spark: SparkSession) -> bool:
    """Tell whether the executors are on the driver's machine, under its user (``local…``)."""
    return master_of(spark).startswith("local")


def is_case_sensitive(spark: SparkSession) -> bool:
    """Tell whether Spark distinguishes columns whose names differ in case only."""
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def use_driver_python(spark: SparkSession) -> None:
    """Make executors on this machine run the driver's Python, unless the user chose another.

    PySpark starts ``python3`` from ``PATH`` otherwise, which is not the driver's when a virtual
    environment was not activated, and then lacks its packages.
    """
    context = classic_context(spark)
    chosen = os.environ.get("PYSPARK_PYTHON") or spark.conf.get("spark.pyspark.python", "")
    if context is not None and not chosen and runs_on_this_machine(spark):
        context.pythonExec = sys.executable


def check_memory_limit(spark: SparkSession) -> None:
    """Refuse to start ranks under the limit PySpark puts on its workers.

    It is a limit of the address space (``RLIMIT_AS``, which cannot be raised again), and every
    process that a worker starts inherits it. TensorFlow reserves several times the addresses of the
    memory it uses, CUDA far more, and both abort in C++ code where they get none, without naming
    the cause. A sufficient limit is not known beforehand.

    Raises:
        EnvironmentProblem: there is such a limit.
    """
    limit = str(spark.conf.get(_MEMORY_LIMIT, "") or "")
    if re.fullmatch(r"0*[a-zA-Z]*", limit):
        return
    raise EnvironmentProblem(
        f"{_MEMORY_LIMIT} is {limit}: Spark makes it a limit of the address space of each Python "
        "worker, which ranks inherit, and under which TensorFlow and CUDA abort, as they reserve "
        "far more addresses than the memory they use. Leave it out, or set it to 0 where a default "
        "sets it, when the Spark session is made; what bounds the memory of ranks is "
        "spark.executor.memoryOverhead"
    )


def check_idle_limit(spark: SparkSession) -> None:
    """Refuse to start ranks where Spark ends their Python workers after some idle time.

    To Spark, a worker whose ranks compute is idle: it reads no rows.

    Raises:
        EnvironmentProblem: Spark would end them.
    """
    kills = str(spark.conf.get(_KILL_ON_IDLE, "false")).lower() == "true"
    limit = str(spark.conf.get(_IDLE_LIMIT, "0") or "0")
    if kills and not re.fullmatch(r"0*[a-zA-Z]*", limit):
        raise EnvironmentProblem(
            f"{_KILL_ON_IDLE} is true and {_IDLE_LIMIT} {limit}: Spark would end the ranks after "
            "that time, because a Python worker whose ranks compute seems idle to it. Leave one of "
            "them out when the Spark session is made"
        )


def check_encryption(spark: SparkSession, options: LaunchOptions) -> None:
    """Refuse unencrypted traffic where Spark is set to encrypt its own, unless it is allowed.

    Raises:
        EnvironmentProblem: Spark encrypts its traffic, and ranks may be on several hosts.
    """
    if options.allow_unencrypted or runs_on_this_machine(spark):
        return
    on = [
        name
        for name in _ENCRYPTION_SETTINGS
        if str(spark.conf.get(name, "false")).lower() == "true"
    ]
    if on:
        raise EnvironmentProblem(
            f"Spark is set to encrypt its traffic ({', '.join(on)}), but gradients and weights "
            "between ranks (MPI) and log lines, large arguments and large results between ranks "
            "and driver are sent unencrypted; use a network that is trusted or encrypts by itself "
            "(WireGuard, IPsec), and confirm it with allow_unencrypted=True"
        )


def new_folder(
    spark: SparkSession, setting: str, default: str, parent: str | os.PathLike[str] | None = None
) -> Location:
    """Return a folder that does not exist, named by the time and some random digits.

    Args:
        spark: the session.
        setting: the setting that names the folder, or its parent.
        default: its parent on a ``local`` master, where no other was given.
        parent: its parent.

    Raises:
        InvalidInputError: there is no parent, and the executors are on other machines.
    """
    if parent is None and not runs_on_this_machine(spark):
        raise InvalidInputError(
            f"{setting} is needed on a cluster: a folder or URL that the driver and all executors "
            "can write to"
        )
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    return Location(default if parent is None else parent).join(name)
