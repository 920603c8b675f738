"""An S3 server of the files in a folder, whose every answer begins late, as a distant one's does.

It does for reading what moto does for writing (see ``object_store.py``), but gives out files by
``sendfile``: moto spends more time on a range of a file than the latency is. It is a process of its
own, which runs on the same cores as what is measured.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

from peers.object_store import BUCKET, running


@contextlib.contextmanager
def static_store(folder: Path, latency: float) -> Iterator[str]:
    """Run it meanwhile and set the environment that leads to it; give the bucket's URL.

    Args:
        folder: what lies in it is in the bucket.
        latency: seconds before an answer begins.
    """
    with running("peers.static_store", str(folder), str(latency)) as url:
        yield url


def list_objects(folder: Path, prefix: str, delimiter: str) -> bytes:
    """Return the answer to ``ListObjectsV2``: always all, in one page."""
    root = ElementTree.Element("ListBucketResult", xmlns="http://s3.amazonaws.com/doc/2006-03-01/")
    shared = set()
    contents = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = path.relative_to(folder).as_posix()
        if not key.startswith(prefix):
            continue
        head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if cut:
            shared.add(prefix + head + cut)
            continue
        contents += 1
        facts = path.stat()
        element = ElementTree.SubElement(root, "Contents")
        changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(facts.st_mtime))
        values = {"Key": key, "Size": str(facts.st_size), "LastModified": changed}
        for name, value in values.items():
            ElementTree.SubElement(element, name).text = value
    for start in sorted(shared):
        element = ElementTree.SubElement(root, "CommonPrefixes")
        ElementTree.SubElement(element, "Prefix").text = start
    values = {"Name": BUCKET, "Prefix": prefix, "IsTruncated": "false"}
    for name, value in {**values, "KeyCount": str(contents + len(shared))}.items():
        ElementTree.SubElement(root, name).text = value
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


class Handler(BaseHTTPRequestHandler):
    """Answers one client; connections stay open between requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path
    latency: float

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        time.sleep(self.latency)
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        path = self.folder / key
        if bucket != BUCKET or (key and not path.is_file()):
            self._begin(404, 0)
        elif key:
            self._file(path, with_body)
        elif with_body:
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            text = list_objects(self.folder, query.get("prefix", ""), query.get("delimiter", ""))
            self._begin(200, len(text), {"Content-Type": "application/xml"})
            self.wfile.write(text)
        else:
            self._begin(200, 0)

    def _file(self, path: Path, with_body: bool) -> None:
        facts = path.stat()
        begin, end = 0, facts.st_size
        headers = {
            "Last-Modified": formatdate(facts.st_mtime, usegmt=True),
            "ETag": f'"{facts.st_mtime_ns:x}-{end:x}"',
            "Accept-Ranges": "bytes",
        }
        wanted = self.headers["Range"]
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, end) if last else end
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{facts.st_size}"
        self._begin(206 if wanted else 200, end - begin, headers)
        if with_body:
            with path.open("rb") as file:
                while begin < end:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)
                    begin += sent

    def _begin(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


class Server(ThreadingHTTPServer):
    request_queue_size = 256


def serve(folder: Path, latency: float) -> None:
    """Be the server until the input ends."""
    Handler.folder, Handler.latency = folder, latency
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
