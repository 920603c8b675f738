"""Interpret paths as users write them. Pure but for users' homes."""

from __future__ import annotations

import os
import posixpath
import re
from urllib.parse import unquote, urlsplit, urlunsplit

from ..errors import InvalidInputError, brief, printable

HDFS_SCHEMES = ("hdfs", "viewfs")
_HALF_A_URL = re.compile(
    r"(s3a?|s3n|gs|gcs|hdfs|viewfs|abfss?|wasbs?|az|adl|oss|dbfs|https?):/(?!/)(.*)", re.DOTALL
)


def check_whole_url(text: str) -> None:
    """Refuse a URL without ``//``, which would be a local folder named ``s3:``.

    Raises:
        InvalidInputError: ``text`` is such a URL.
    """
    match = _HALF_A_URL.match(text)
    if match is None:
        return
    scheme, path = match.groups()
    if scheme == "dbfs":
        hint = f"on Databricks that is /dbfs/{path} to all processes"
    elif scheme in HDFS_SCHEMES:
        hint = f"write {scheme}:///{path}, or {scheme}://NAMENODE/{path}"
    else:
        hint = f"write {scheme}://{path} as text: pathlib takes one of the slashes away"
    raise InvalidInputError(f"{text!r} is neither a path nor a whole URL; {hint}")


def scheme_of(text: str) -> str:
    """Return the scheme of a URL, in lower case; ``""`` for a path.

    Raises:
        InvalidInputError: the URL is malformed.
    """
    if "://" not in text and not text.startswith("file:"):
        return ""
    try:
        return urlsplit(text).scheme
    except ValueError as error:
        raise InvalidInputError(f"invalid URL {text!r}: {error}") from error


def path_of_url(url: str) -> str:
    """Return the path of a ``file:`` URL, in which ``?`` and ``#`` are letters, as in Hadoop.

    Raises:
        InvalidInputError: it names another machine.
    """
    host, path = "", url.partition(":")[2]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        path = slash + rest
    if host not in ("", "localhost"):
        raise InvalidInputError(
            f"{url} names the host {host!r}; a file on this one is file:///path, with three slashes"
        )
    return unquote(path)


def expand_home(path: str) -> str:
    """Return ``path`` with ``~`` and ``~user`` replaced by that user's home.

    Raises:
        InvalidInputError: the user is unknown.
    """
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        user = path.partition("/")[0]
        raise InvalidInputError(
            f"{path}: unknown user in {user}; a folder of that name is ./{user}"
        )
    return expanded


def credentials_hint(scheme: str) -> str:
    """Return a hint if this process has no credentials for the storage in its environment."""
    if scheme != "s3" or any(name.startswith("AWS_") for name in os.environ):
        return ""
    return (
        ". This process has none of the environment variables AWS_… for endpoint, region and "
        "credentials, and Spark's settings fs.s3a.… are only for Spark; pass the driver's to "
        "executors with spark.executorEnv.NAME, before the Spark session is made"
    )


def check_name(name: object) -> str:
    """Return the relative name of a file, if it stays within its folder.

    Raises:
        InvalidInputError: it is not a name, leads out of the folder, or holds control characters.
    """
    text = str(name)
    parts = text.split("/") if isinstance(name, str) else [""]
    if {"", ".", ".."} & {*parts} or re.search(r"[\t\n\\]", text) or printable(text) != text:
        raise InvalidInputError(f"{brief(name)} cannot be the name of a file within a folder")
    return text


def parent_of_url(url: str) -> str:
    """Return the folder that a file or folder is in; a root itself."""
    scheme, _, place = url.partition("://")
    # "hdfs:///a" leaves out the name node, and its root is no folder "hdfs:" of this machine.
    authority, _, path = place.partition("/")
    above = posixpath.dirname(path.rstrip("/"))
    return f"{scheme}://{authority}{'/' if above or not authority else ''}{above}"


def redact_url(text: str) -> str:
    """Return ``text`` without the user, password and query of a URL, if it is one."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return text.partition("://")[0] + "://…"
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
