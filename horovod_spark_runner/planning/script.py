"""A plan of what a script would train: it is run up to its first training, which is measured."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import sysconfig
import threading
import traceback
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..data.prepare.datasets import session_of
from ..errors import HorovodSparkError, InvalidInputError, RunCancelledError
from ..launch.driver.console import Console
from ..run.default_place import default_place
from ..run.looked_at import hand_over_to
from ..run.request import TrainingRequest
from ..rundir.directory import RunDirectory
from ..settings.sync import Allreduce, recorded_sync
from ..storage.filesystem import Location
from .asked import Asked
from .call import plan_request
from .plan import TrainingPlan

_PACKAGE = str(Path(__file__).parents[1])
_TAKES = "a script is planned that calls run_training or HorovodEstimator.fit"


class _Ended(SystemExit):
    """Ends the script, as ``sys.exit()`` would: what it does in ``finally`` is done."""


def _end() -> NoReturn:
    """End the script.

    Raises:
        RunCancelledError: in a thread of its own, which pools pass on to whoever waits for it.
    """
    if threading.current_thread() is threading.main_thread():
        raise _Ended
    raise RunCancelledError("the script is only planned: nothing is trained")


class _Taker:
    """Plans the first training that a script begins, and ends the script; no training is begun.

    Args:
        asked: what the plan is to tell.
        place: folder for the plan; by default the training's own, or a new one.

    Attributes:
        plan: of the first training.
        error: why it could not be planned.
    """

    def __init__(self, asked: Asked, place: str | None) -> None:
        self._asked = asked
        # Where these are must not change with the script's working directory.
        self._place = None if place is None else str(Location(place))
        self._plans = os.path.abspath("plans")
        # Held while one measures: two at once would slow each other down. The thread that holds it
        # may come again, from what it calls.
        self._measuring = threading.RLock()
        self._closed = False
        self.plan: TrainingPlan | None = None
        self.error: Exception | None = None

    def __call__(self, asked: Any) -> NoReturn:
        with self._measuring:
            # A script that goes on after its end, one that tries again, and its other threads get
            # no further.
            if not self._closed:
                self._closed = True
                try:
                    self.plan = self._planned(asked)
                except Exception as error:
                    self.error = error
                    raise
        _end()

    def close(self) -> None:
        """Let nothing more be planned; what is being measured goes on."""
        self._closed = True

    def wait(self) -> None:
        """Wait for the thread that is measuring, if one is."""
        with self._measuring:
            pass

    def _planned(self, asked: Any) -> TrainingPlan:
        if not isinstance(asked, TrainingRequest):
            name = getattr(asked, "__qualname__", repr(asked))
            raise InvalidInputError(
                f"the script would run {name}, of which nobody knows what it trains; {_TAKES}"
            )
        place = self._place or self._default(asked)
        console = Console(RunDirectory(place).location.name, quiet=not asked.stream_logs)
        console.say(f"measuring what the script would train, in {place}; nothing is trained")
        if asked.sync != Allreduce():
            console.say(f"planned as Allreduce(), in place of {recorded_sync(asked.sync)}")
        return plan_request(asked, self._asked, place)

    def _default(self, asked: TrainingRequest) -> str:
        """Return the run directory of the training, whose report shows the plan, if it is new."""
        if asked.run_dir is not None and not RunDirectory(str(asked.run_dir)).config.exists():
            return str(asked.run_dir)
        return default_place(session_of(asked.frame), "--plan-dir", self._plans)


def plan_script(
    script: Path, arguments: Sequence[str], asked: Asked, place: str | None = None
) -> TrainingPlan:
    """Run a script as Python would, up to its first training, and return the plan of that.

    The script runs in this process, as ``__main__``, which trains nothing any more from then on:
    threads of the script may outlive its main code. What that prints goes to standard error.

    Args:
        script: its file.
        arguments: its arguments.
        asked: what the plan is to tell.
        place: folder for the plan; by default the ``run_dir`` of the training, if it holds no run.

    Raises:
        InvalidInputError: the script fails, or trains nothing that can be planned.
        HorovodSparkError: the training cannot be measured; see `plan_training`.
        OSError: storage fails.
    """
    taker = _Taker(asked, place)
    failed: BaseException | None = None
    before = set(threading.enumerate())
    hand_over_to(taker)
    with _as_program(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except (Exception, SystemExit) as error:
            failed = error
        finally:  # also where it is interrupted
            taker.close()
        taker.wait()
    if isinstance(taker.error, (HorovodSparkError, OSError)):
        raise taker.error
    if taker.error is not None:
        raise InvalidInputError(
            f"what {script} would train cannot be measured:\n{_told(taker.error, script)}"
        ) from taker.error
    if taker.plan is not None:
        return taker.plan
    if failed is None:
        raise InvalidInputError(
            f"{script} has ended without a training{_going_on(before)}; {_TAKES}"
        )
    if isinstance(failed, SystemExit):
        raise InvalidInputError(
            f"{script} has ended by sys.exit({failed.code!r}) before a training; arguments for it "
            "are given after --"
        )
    if isinstance(failed, HorovodSparkError):  # which says what is wrong with what the script asks
        raise InvalidInputError(f"{script}{_line(failed, script)}: {failed}") from failed
    raise InvalidInputError(
        f"{script} has failed before a training:\n{_told(failed, script)}"
    ) from failed


def _going_on(before: Container[threading.Thread]) -> str:
    """Return what to say of threads that Python would wait for, but were not there before."""
    names = [one.name for one in threading.enumerate() if one not in before and not one.daemon]
    if not names:
        return ""
    return (
        f", but threads of it go on ({', '.join(names)}), whose trainings are planned only if the "
        "script waits for them"
    )


@contextlib.contextmanager
def _as_program(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Let a script find what it would as the program of this process."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _line(error: BaseException, script: Path) -> str:
    """Return which line of a script an error has come from, and of what it calls, for people."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [place for place, one in enumerate(frames) if one.filename == str(script)]
    if not own:
        return ""
    called = [one for one in frames[own[-1] + 1 :] if _is_users(one.filename)]
    told = [f"line {frames[own[-1]].lineno}"]
    told += [f"in {one.filename}, line {one.lineno}" for one in called]
    return f", {', '.join(told)}"


def _is_users(file: str) -> bool:
    """Tell whether a file is the user's own, and neither installed nor part of this package."""
    return not file.startswith((_PACKAGE, *sysconfig.get_paths().values(), "<"))


def _told(error: BaseException, script: Path) -> str:
    """Return the traceback of a script, without what has run it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = next((i for i, one in enumerate(frames) if one.filename == str(script)), len(frames))
    lines = traceback.format_list(frames[own:])
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
