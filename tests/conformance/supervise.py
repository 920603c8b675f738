"""Starts the two worlds, and starts one again after a case that ended it or got stuck."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from horovod_spark_runner.cluster.slot.workspace import Workspace
from tests.preload import PATIENT, build

from .case import Case
from .data import write_once
from .recording import Recording, load, save
from .world import PARTS, keys_of

ROOT = Path(__file__).resolve().parents[2]
# Seconds: for the frameworks to be imported, for a case, and for the other ranks once one is done.
START, CASE, OTHERS = 300.0, 300.0, 30.0
_TAIL = 4000
_PR_SET_PDEATHSIG = 1


class World:
    """One of the two worlds, from its first case to its last.

    Args:
        folder: where recordings go.
        part: ``"one"`` or ``"two"``.
        cases: what to train.
        patient: library that makes its ranks wait for each other without using a core.
    """

    def __init__(
        self, folder: Path, part: str, cases: Sequence[Case], patient: Path | None
    ) -> None:
        self._folder = folder
        self._part = part
        self._left = list(cases)
        self._patient = patient
        self._stopped = threading.Event()
        self._began = 0.0
        self._thread = threading.Thread(target=self._run, name=f"world-{part}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the world, whatever is left to do."""
        self._stopped.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait for the last case."""
        self._thread.join()

    def result(self, case: Case) -> list[Recording]:
        """Return the recordings of a case, as soon as they are there."""
        files = self._files(case)
        while not all(file.exists() for file in files):
            if not self._thread.is_alive() and not all(file.exists() for file in files):
                raise RuntimeError(f"the world of {self._part!r} ended without {case.name!r}")
            time.sleep(0.05)
        return [load(file) for file in files]

    def _files(self, case: Case) -> list[Path]:
        keys = [key for key in keys_of(self._part) if key != "fit" or not case.refused]
        return [self._folder / case.name / f"{key}.npz" for key in keys]

    def _run(self) -> None:
        while self._left and not self._stopped.is_set():
            log = self._folder / f"{self._part}.log"
            with log.open("wb") as output:
                # What MPI leaves in temporary folders and shared memory goes with this.
                workspace = Workspace(f"conformance-{uuid.uuid4().hex[:8]}")
                process = subprocess.Popen(
                    self._command(workspace.shared_memory),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(workspace.path, self._patient),
                    cwd=ROOT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
                workspace.watch(process.pid)
                try:
                    reason = self._watch(process)
                finally:
                    _end(process)
                    workspace.close()
            if self._left and not self._stopped.is_set():
                self._give_up(self._left.pop(0), reason, log)

    def _command(self, segments: Path | None) -> list[str]:
        size = PARTS[self._part]
        names = [case.name for case in self._left]
        program = [sys.executable, "-m", "tests.conformance.world", str(self._folder), self._part]
        if size == 1:
            return [*program, *names]
        mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", str(size)]
        mpirun += ["--host", f"localhost:{size}", "--bind-to", "none"]
        mpirun += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]
        if segments is not None:
            mpirun += ["--mca", "btl_sm_backing_directory", str(segments)]
        if os.geteuid() == 0:
            mpirun.append("--allow-run-as-root")
        return [*mpirun, *program, *names]

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until the world has ended or is stuck; return why."""
        self._began = time.monotonic()
        limit, first = START + CASE, 0.0
        while not self._stopped.is_set():
            over = process.poll() is not None
            while self._left and all(f.exists() for f in self._files(self._left[0])):
                self._left.pop(0)
                self._began, limit, first = time.monotonic(), CASE, 0.0
            if over or not self._left:
                return f"the process ended with code {process.returncode}"
            now = time.monotonic()
            if now - self._began > limit:
                return f"it was not done after {limit:.0f} s"
            if self._part == "two" and any(f.exists() for f in self._files(self._left[0])):
                first = first or now
                if now - first > OTHERS:
                    return f"this rank was still busy {OTHERS:.0f} s after the other had ended"
            time.sleep(0.05)
        return "stopped"

    def _give_up(self, case: Case, reason: str, log: Path) -> None:
        files = self._files(case)
        others = [load(file) for file in files if file.exists()]
        heard = "".join(f"; the other: {other.error}" for other in others if other.error)
        tail = log.read_bytes()[-_TAIL:].decode(errors="replace")
        for file in files:
            if not file.exists():
                save(Recording(error=f"{reason}{heard}", trace=tail), file)


def _end_with_parent() -> None:
    """Let the world end, also mpirun's, if the tests are killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _environment(temporary: Path, patient: Path | None) -> dict[str, str]:
    """Return an environment like that of a rank on one core, preloaded with ``patient``."""
    return {
        **os.environ,
        **({} if patient is None else {"LD_PRELOAD": str(patient)}),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "KERAS_BACKEND": "tensorflow",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(temporary),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # mpirun ends its ranks
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start(folder: Path, cases: Sequence[Case], parts: Iterable[str] = PARTS) -> dict[str, World]:
    """Write the data and start the worlds, which work side by side."""
    write_once(folder)
    patient = build(PATIENT, folder)
    return {part: World(folder, part, cases, patient) for part in parts}


def differences(
    case: Case,
    worlds: dict[str, World],
    compare: Callable[..., list[str]],
    *parts: str,
) -> list[str]:
    """Return what ``compare`` finds in the recordings of a case, in the order of ``parts``."""
    found: dict[str, Recording] = {}
    for part in PARTS:
        if any(key in keys_of(part) for key in parts):
            recordings = worlds[part].result(case)
            keys = [key for key in keys_of(part) if key != "fit" or not case.refused]
            found.update(zip(keys, recordings, strict=True))
    return compare(case, *(found.get(key, Recording()) for key in parts))
