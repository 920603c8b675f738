"""Pickles for the workers."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import linecache
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner.errors import InvalidInputError
from horovod_spark_runner.serialize import (
    check_picklable,
    dump_call,
    dumps,
    dumps_without,
    loads_with,
)

ROOT = Path(__file__).resolve().parents[2]


def test_a_captured_lock_is_named() -> None:
    lock = threading.Lock()

    def model_fn() -> object:
        return lock

    with pytest.raises(InvalidInputError, match="model_fn.*variable 'lock'"):
        check_picklable({"model_fn": model_fn})


def test_the_innermost_culprit_is_named() -> None:
    class Holder:
        def __init__(self) -> None:
            self.fine = 1
            self.handles = {"log": threading.Lock()}

    with pytest.raises(InvalidInputError, match="'log'.*_thread.lock"):
        check_picklable({"callbacks": [Holder()]})


LOCK = threading.Lock()


def test_a_global_of_an_inner_function_is_named() -> None:
    def model_fn() -> object:
        class Callback:
            def on_epoch_end(self) -> bool:
                return LOCK.locked()

        return Callback()

    with pytest.raises(InvalidInputError, match="global 'LOCK'.*model_fn"):
        check_picklable({"model_fn": model_fn})


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(InvalidInputError, match="argument 1"):
        dump_call(print, (1, threading.Lock()), {})
    with pytest.raises(InvalidInputError, match="argument key"):
        dump_call(print, (), {"key": threading.Lock()})


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"function.*\b3"):
        dump_call(3, (), {})  # type: ignore[arg-type]


def test_code_stays_that_of_its_file() -> None:
    def outer() -> Callable[[], str]:
        return lambda: "found"

    for read in (pickle.loads(dumps(outer)), loads_with(*dumps_without(outer, bytes))):
        assert read.__code__ is not outer.__code__
        assert read.__code__.co_filename == read().__code__.co_filename == __file__
        assert inspect.getsource(read) == inspect.getsource(outer)


def loaded_elsewhere(payload: bytes, code: str, folder: Path) -> str:
    """Return what ``code`` prints in another process, where the payload is ``it``."""
    (folder / "payload").write_bytes(payload)
    load = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    load += "import pickle; it = pickle.load(open(sys.argv[1], 'rb'))\n"
    run = subprocess.run(
        [sys.executable, "-I", "-c", load + code, str(folder / "payload")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_code_brings_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a notebook's cell, and that of a file as it was when it was sent."""
    show = "import inspect; print(inspect.getsource(it))"
    cell = "/tmp/ipykernel_1/777.py"
    text = "def told(x):\n    return x + 1\n"
    monkeypatch.setitem(linecache.cache, cell, (len(text), None, text.splitlines(True), cell))
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, cell, "exec"), space)
    assert loaded_elsewhere(dumps(space["told"]), show, tmp_path) == text.strip()

    script = tmp_path / "hsr_script.py"
    script.write_text(text)
    exec(compile(text, str(script), "exec"), space)
    payload = dumps(space["told"])
    script.write_text("# edited since\n" + text)
    assert loaded_elsewhere(payload, show, tmp_path) == text.strip()
    # What was edited and loaded again is sent as it is now.
    later = text.replace("x + 1", "x * 1000 + 7")
    script.write_text(later)
    os.utime(script, (1, 1))
    exec(compile(later, str(script), "exec"), space)
    assert loaded_elsewhere(dumps(space["told"]), show, tmp_path) == later.strip()
    # A process that has read the file itself reads it again when it has changed.
    entry = linecache.cache[str(script)]
    assert pickle.loads(payload)(1) == 2
    assert pickle.loads(dumps(space["told"]))(1) == 1007
    assert linecache.cache[str(script)] is entry


def test_cached_functions_travel_by_value(tmp_path: Path) -> None:
    """Pickled by name, one called ``main`` would be whatever the workers' own script calls so."""
    space: dict[str, Any] = {"__name__": "__main__"}
    text = (
        "import functools\n"
        "@functools.lru_cache(maxsize=7, typed=True)\n"
        "def main(n):\n"
        "    return 1 if n < 2 else n * main(n - 1)\n"
    )
    exec(text, space)
    show = "print(it(5), it.cache_info().maxsize, it.cache_parameters()['typed'])"
    assert loaded_elsewhere(dumps(space["main"]), show, tmp_path) == "120 7 True"

    @functools.cache
    def local(x: int) -> int:
        return -x

    assert loaded_elsewhere(dumps(local), "print(it(3))", tmp_path) == "-3"

    class Holder:
        @functools.cached_property
        def half(self) -> float:
            return 0.5

        @functools.lru_cache  # noqa: B019 - as users write them
        def twice(self, x: int) -> int:
            return 2 * x

    show = "print(it.half, vars(it), it.twice(3))"
    assert loaded_elsewhere(dumps(Holder()), show, tmp_path) == "0.5 {'half': 0.5} 6"
    # What a rank returns is of a module that it cannot import.
    again = "import io; from horovod_spark_runner.serialize import Pickler\n"
    again += "out = io.BytesIO(); Pickler(out).dump(it); print(pickle.loads(out.getvalue())(5))"
    assert loaded_elsewhere(dumps(space["main"]), again, tmp_path) == "120"
    installed = fnmatch._compile_pattern  # type: ignore[attr-defined]
    assert pickle.loads(dumps(installed)) is installed


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

    monkeypatch.setitem(sys.modules, "hsr_other_name", hsr_model)  # as PySpark has of its own
    code = "f, x = it; print(f(x)); assert 'hsr_model' not in sys.modules"
    assert loaded_elsewhere(dumps((hsr_model.f, 4)), code, tmp_path) == "9"
