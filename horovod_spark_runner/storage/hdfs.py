"""HDFS without Java: the client of the package hdfs-native, as a file system of pyarrow.

pyarrow's client needs libhdfs, a JVM in every rank and Hadoop's class path in the environment, none
of which the Python of a Spark executor has.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pyarrow.fs as pafs
from hdfs_native.fsspec import HdfsFileSystem

# Seconds; the client itself tries for minutes, which is right only during a run.
_CONNECT_TIMEOUT = 10.0
# The name node's answer as hdfs-native shows it: Java's exception, its message, its stack.
_ANSWER = re.compile(r'RPCError\("([\w.$]+)", "(.*?)(?:\\n|\n|"\)$)', re.DOTALL)


def connect(scheme: str, authority: str) -> pafs.FileSystem:
    """Return the file system of an HDFS URL.

    Settings, such as the addresses of a name service, are those in ``HADOOP_CONF_DIR``.

    Args:
        scheme: ``"hdfs"`` or ``"viewfs"``.
        authority: name node with port, or name service; ``""`` for the default file system.

    Raises:
        OSError: the name node cannot be reached, or the settings lack what the URL leaves out.
    """
    # A forked process cannot use the threads of its parent's client.
    return _connect(scheme, authority, os.getpid())


@functools.lru_cache(maxsize=16)
def _connect(scheme: str, authority: str, process: int) -> pafs.FileSystem:
    address = urlsplit(f"//{authority}")
    if address.hostname and address.port:
        socket.create_connection((address.hostname, address.port), _CONNECT_TIMEOUT).close()
    # On YARN without Kerberos, containers run as another user than the one who submitted.
    if "SPARK_USER" in os.environ:
        os.environ.setdefault("HADOOP_USER_NAME", os.environ["SPARK_USER"])
    kind = _Viewfs if scheme == "viewfs" else _Hdfs
    return pafs.PyFileSystem(pafs.FSSpecHandler(_call(kind, authority or None)))


class _Hdfs(HdfsFileSystem):
    """Adapts hdfs-native's file system to pyarrow."""

    cachable = False
    client: Any

    def __init__(self, host: str | None) -> None:
        super().__init__(host)
        self.client = _Translated(self.client)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path  # a path, not a URL: "#" and "?" are parts of names

    def _convert_file_status(self, file_status: Any) -> dict[str, object]:
        facts: dict[str, object] = super()._convert_file_status(file_status)
        return {**facts, "mtime": file_status.modification_time / 1000}

    def _open(self, path: str, *args: Any, **options: Any) -> object:
        return _Translated(super()._open(path, *args, **options))

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self.client.rename(path1, path2, True)  # in one step, in place of an older file


class _Viewfs(_Hdfs):
    protocol = "viewfs"


class _Translated:
    """A client or a file whose errors are all ``OSError``, without Java's stack."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        value = getattr(self._inner, name)
        return functools.partial(_call, value) if callable(value) else value


def _call(function: Callable[..., object], *args: object, **options: Any) -> object:
    try:
        return function(*args, **options)
    except RuntimeError as error:
        answer = _ANSWER.search(str(error))
        text = f"{answer[2]} ({answer[1]})".replace('\\"', '"') if answer else str(error)
        raise OSError(text) from error
    except OSError as error:
        text, java, _ = str(error).partition("\n\tat ")
        raise (type(error)(text) if java else error) from None
