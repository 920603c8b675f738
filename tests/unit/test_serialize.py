"""Pickling for the workers."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.serialize import (
    check_picklable,
    dump_call,
    dumps,
    dumps_without,
    loads_with,
)


def test_a_captured_lock_is_named() -> None:
    lock = threading.Lock()

    def model_fn() -> object:
        return lock

    with pytest.raises(
        InvalidInputError, match=r"model_fn cannot be sent.*variable 'lock' captured"
    ):
        check_picklable({"model_fn": model_fn})


def test_the_innermost_culprit_is_named() -> None:
    class Holder:
        def __init__(self) -> None:
            self.fine = 1
            self.handles = {"log": threading.Lock()}

    with pytest.raises(InvalidInputError, match=r"entry 'log' \(a _thread.lock\)"):
        check_picklable({"callbacks": [Holder()]})


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"argument 1 cannot be sent"):
        dump_call(print, (1, threading.Lock()), {})
    with pytest.raises(InvalidInputError, match=r"argument key cannot be sent"):
        dump_call(print, (), {"key": threading.Lock()})


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="a function is needed, got 3"):
        dump_call(3, (), {})  # type: ignore[arg-type]


def test_code_stays_that_of_its_file() -> None:
    def outer() -> Callable[[], str]:
        return lambda: "found"

    for read in (pickle.loads(dumps(outer)), loads_with(*dumps_without(outer, bytes))):
        assert read.__code__ is not outer.__code__
        assert read.__code__.co_filename == read().__code__.co_filename == __file__
        assert inspect.getsource(read) == inspect.getsource(outer)


def test_mentioned_frameworks_get_a_head_start() -> None:
    def uses_tensorflow() -> object:
        import tensorflow

        return tensorflow

    assert dump_call(uses_tensorflow, (), {})[1] == ("tensorflow", "horovod.tensorflow")
    assert dump_call(max, (1,), {})[1] == ()


def test_the_callers_own_modules_travel_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hsr_helper.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "hsr_model.py").write_text(
        "import hsr_helper\n\ndef f(x):\n    return hsr_helper.twice(x) + 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import hsr_model  # type: ignore[import-not-found]

    (tmp_path / "call").write_bytes(dumps((hsr_model.f, 4)))
    code = (
        "import pickle, sys; f, x = pickle.load(open(sys.argv[1], 'rb')); print(f(x));"
        "assert 'hsr_model' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path / "call")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == "9", run.stderr
