"""An object store for tests: moto's S3 server, in this process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

from horovod_spark_runner.storage.filesystem import Location


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run a server; give its URL."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        running.stop()


def empty_folder(server: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Location:
    """Return a folder of a bucket, with nothing in it; this process reaches it during the test.

    Args:
        server: URL of the server.
        url: of the folder; its bucket is made.
        monkeypatch: the test's.
    """
    import boto3

    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": server,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = url.removeprefix("s3://").partition("/")[0]
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    folder = Location(url)
    folder.delete_folder()
    return folder
