"""HDFS as far as it goes without a name node; tests/mpi/test_hdfs.py has the rest."""

from __future__ import annotations

import sys

import pytest

from horovod_spark_runner.errors import EnvironmentProblem, InvalidInputError, UnreachableError
from horovod_spark_runner.storage import hdfs
from horovod_spark_runner.storage.filesystem import Location

ANSWER = (
    'RPCError("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", '
    '"The quota of \\"/run\\" is exceeded\\n\\tat org.apache.hadoop.Some(Some.java:1)\\n")'
)


def fail(error: Exception) -> None:
    raise error


def test_a_name_node_that_does_not_answer_is_an_error_at_once() -> None:
    with pytest.raises(UnreachableError, match=r"hdfs://127\.0\.0\.1:9/run"):
        Location("hdfs://127.0.0.1:9/run").exists()


def test_a_name_service_nobody_knows() -> None:
    with pytest.raises(InvalidInputError, match="hdfs://nobody/run"):
        Location("hdfs://nobody/run").exists()


def test_what_the_name_node_refuses_is_an_os_error_without_the_stack() -> None:
    text = r'^The quota of "/run" is exceeded \(org\.apache\.hadoop\.hdfs\.\w+\.DSQuota\w+\)$'
    with pytest.raises(OSError, match=text):
        hdfs._call(fail, RuntimeError(ANSWER))
    with pytest.raises(FileNotFoundError) as missing:
        hdfs._call(fail, FileNotFoundError("/a b\n\tat org.apache.hadoop.Some(Some.java:1)"))
    assert str(missing.value) == "/a b"
    with pytest.raises(IsADirectoryError, match="/x"):
        hdfs._call(fail, IsADirectoryError("/x"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod_spark_runner.storage.hdfs", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'horovod_spark_runner\[hdfs\]'"):
        Location("hdfs://name/run").exists()
