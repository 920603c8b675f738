"""``horovod-spark-runner doctor``: check whether this environment can train; print advice.

The doctor's own process imports no framework: what only they can tell comes from a process that
may crash.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from .._version import __version__
from ..cluster.protocol.command import clean_environment, transport_parameters
from ..cluster.protocol.processes import describe_exit, find_mpirun
from ..cluster.slot.node_runtime import BACKING_DIRECTORY
from ..cluster.slot.workspace import Workspace
from ..errors import EnvironmentProblem
from .doctor_checks import (
    OK,
    PACKAGES,
    PROBLEM,
    QUERY,
    WARNING,
    Finding,
    Probes,
    check_allreduce,
    check_gpus,
    check_java,
    check_mpirun,
    check_packages,
    check_platform,
    check_probes,
    check_tensorflow_packages,
    check_variables,
    matching_rules,
    parse_java_version,
    parse_mpirun_version,
    summary,
)

_PROBE_TIMEOUT = 120.0
_ALLREDUCE_TIMEOUT = 120.0
_TAIL_LINES = 10
_PROBE = (sys.executable, "-m", f"{__package__}.doctor_probe")
_COLOURS = {OK: "32", WARNING: "33", PROBLEM: "31"}


def command(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if there is a problem, else 0."""
    print(f"horovod-spark-runner {__version__}")
    findings = []
    for finding in _examine(run=not arguments.no_run):
        findings.append(finding)
        print(_format_finding(finding, colour=sys.stdout.isatty()), flush=True)
    print(summary(findings))
    return int(any(finding.level == PROBLEM for finding in findings))


def _format_finding(finding: Finding, *, colour: bool = False) -> str:
    """Return ``finding`` as the lines that are printed."""
    level = f"{finding.level:8}"
    if colour:
        level = f"\033[{_COLOURS[finding.level]}m{level}\033[0m"
    hint = f"\n         → {finding.hint}" if finding.hint else ""
    return f"{level} {finding.text}{hint}"


def _examine(*, run: bool) -> Iterator[Finding]:
    """Yield the findings, one after the other as they are made.

    Args:
        run: whether to start two ranks.
    """
    yield Finding(OK, f"Python {platform.python_version()} ({sys.executable})")
    yield check_platform(platform.system(), platform.machine())
    java, java_output, home = _java()
    yield check_java(java, java_output, home)
    installed = _installed_distributions()
    versions = {name: version for name, _, version in installed}
    yield from check_packages(versions)
    yield from check_tensorflow_packages([d for name, d, _ in installed if name == "tensorflow"])
    yield from matching_rules({**versions, **_unlisted_versions(java_output)})
    yield from check_variables(os.environ)
    try:
        mpirun = find_mpirun()
    except EnvironmentProblem as error:
        yield Finding(PROBLEM, str(error))
        return
    code, output = _output([mpirun, "--version"], _PROBE_TIMEOUT)
    yield check_mpirun(mpirun, output or code)
    probes = _probe()
    driver = ""
    if shutil.which(QUERY[0]) is not None:
        finding, driver = check_gpus(*_output(QUERY, _PROBE_TIMEOUT))
        yield finding
    yield from check_probes(probes, versions, parse_mpirun_version(output), driver)
    if run:
        yield _allreduce(mpirun)


def _installed_distributions() -> list[tuple[str, str, str]]:
    """Return (name shown, distribution, version) of those of `PACKAGES` that are installed."""
    installed = []
    for name, distributions, _ in PACKAGES:
        for distribution in distributions:
            try:
                installed.append((name, distribution, metadata.version(distribution)))
            except metadata.PackageNotFoundError:
                continue
    return installed


def _unlisted_versions(java: str | None) -> dict[str, str]:
    # Not platform.python_version(): distributions append a "+", which is no version.
    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    if (number := parse_java_version(java)) is not None:
        versions["java"] = str(number)
    try:
        versions["setuptools"] = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        pass
    return versions


def _java() -> tuple[str, str | None, str | None]:
    """Return the arguments of ``check_java``."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    if shutil.which(java) is None:
        return java, None, home
    _, output = _output([java, "-version"], _PROBE_TIMEOUT)
    return java, output, home


def _probe() -> Probes:
    end, output = _output([*_PROBE, "facts"], _PROBE_TIMEOUT, merge=False)
    facts = {line.pop("probe"): line for line in _printed_reports(output, "probe")}
    return Probes(facts, end)


def _allreduce(mpirun: str) -> Finding:
    # What MPI leaves in temporary folders and shared memory if it is killed goes with this one.
    with contextlib.closing(Workspace(f"doctor-{uuid.uuid4().hex[:8]}")) as workspace:
        arguments = [mpirun, "--host", "localhost:2", "-n", "2", "--bind-to", "none"]
        if os.geteuid() == 0:
            arguments.append("--allow-run-as-root")
        for name, value in transport_parameters(1).items():
            arguments += ["--mca", name, value]
        end, output = _output(
            [*arguments, *_PROBE, "allreduce"], _ALLREDUCE_TIMEOUT, workspace=workspace
        )
    reports = list(_printed_reports(output, "sums"))
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("{")]
    return check_allreduce(reports, end, lines[-_TAIL_LINES:] if end else ())


def _printed_reports(output: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield a probe's printed reports that have a key; other output is skipped."""
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                report = json.loads(line)
                if key in report:
                    yield report


def _output(
    arguments: Sequence[str],
    timeout: float,
    *,
    merge: bool = True,
    workspace: Workspace | None = None,
) -> tuple[str, str]:
    """Run a program; return its failure (empty if it has none) and its output.

    Args:
        arguments: its argv.
        timeout: seconds after which it and all it started is killed.
        merge: also return what it wrote to standard error.
        workspace: takes its temporary files; it ends with that one, too.
    """
    environment = {**clean_environment(os.environ), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if workspace is not None:
        environment["TMPDIR"] = str(workspace.path)
        if workspace.shared_memory is not None:
            environment[BACKING_DIRECTORY] = str(workspace.shared_memory)
    with subprocess.Popen(
        list(arguments),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merge else subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        if workspace is not None:
            workspace.watch(process.pid)
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"it had not ended after {timeout:.0f} s", output
    end = f"it {describe_exit(process.returncode)}" if process.returncode else ""
    return end, output
