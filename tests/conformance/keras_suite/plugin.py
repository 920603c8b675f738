"""A pytest plugin for Keras' own tests: their ``fit`` is ours, and what comes of them is noted."""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import sys
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .adapter import Calls

RESULTS = "KERAS_SUITE_RESULTS"
MARKERS = ("requires_trainable_backend", "multi_device")
# Keras' check of a layer trains it for a step.
CALLS_FIT = re.compile(r"\.fit\(|\.run_layer_test\(|getattr\(model, method\)\(")
OWN_CALL = re.compile(r"\bself\.(\w+)\(")

_results: dict[str, dict[str, Any]] = {}
_calls: Calls


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests what they import beside Keras, and their ``fit``."""
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: Keras' own")
    import horovod.tensorflow as hvd
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    from .adapter import Calls, make_fit

    # Some of Keras' tests import these at their top, for other backends. Keras itself looks for
    # the first, so it must be loaded by now.
    for name, values in {
        "jax": {},
        "grain": {},
        "conftest": {"skip_if_backend": _skip_if_backend},
    }.items():
        if name not in sys.modules:
            sys.modules[name] = _module(name, **values)
    hvd.init()
    global _calls
    _calls = Calls()
    TensorFlowTrainer.fit = make_fit(_calls)


def _module(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(values)
    return module


def _skip_if_backend(backend: str, reason: str) -> Callable[[Any], Any]:
    return pytest.mark.skipif(backend == "tensorflow", reason=reason)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Leave out the tests that train nothing, and would show Keras to itself."""
    left_out = [item for item in items if not is_of_training(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if is_of_training(item)]
    # What is imported stays: Python need not look through it for garbage again and again.
    gc.collect()
    gc.freeze()


def is_of_training(item: Any) -> bool:
    """Tell whether a test calls ``fit``, by itself or by a method of its class."""
    text = inspect.getsource(item.function)
    own = vars(item.cls)
    helpers = [own[name] for name in OWN_CALL.findall(text) if inspect.isfunction(own.get(name))]
    return any(CALLS_FIT.search(part) for part in (text, *map(inspect.getsource, helpers)))


def name_of(item: Any) -> str:
    """Return ``"trainers.trainer_test::TestTrainer::test_fit_flow_eager"``."""
    module = item.module.__name__.removeprefix("keras.src.")
    return f"{module}::{item.cls.__name__}::{item.name}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Generator[None, Any, Any]:
    _calls.asked, _calls.trained, _calls.refused[:] = 0, 0, []
    _results[name_of(item)] = {"outcome": "passed", "message": ""}
    result = yield
    _results[name_of(item)] |= {
        "asked": _calls.asked,
        "trained": _calls.trained,
        "refused": list(_calls.refused),
    }
    # Keras looks for garbage before each test: not again in what TensorFlow keeps of this one.
    gc.collect()
    gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    report = yield
    found = _results[name_of(item)]
    found["seconds"] = round(found.get("seconds", 0.0) + report.duration, 2)
    if report.skipped or report.failed:
        found["outcome"] = report.outcome
        message = report.longrepr[2] if report.skipped else str(call.excinfo.value)
        found["message"] = f"{call.excinfo.typename}: {message}"
    return report


def pytest_sessionfinish() -> None:
    Path(os.environ[RESULTS]).write_text(json.dumps(_results, indent=1))
