"""Facts about the supported frameworks, without importing them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass

# Dotted names of the engines' modules, as in models, runs and checkpoints.
KERAS = "horovod_spark_runner.engines.keras.engine"
TORCH = "horovod_spark_runner.engines.torch.engine"


@dataclass(frozen=True)
class _Framework:
    """One framework.

    Attributes:
        model: name of its models in messages.
        transformer: name of the public class of its trained models.
        packages: its packages, each after those it depends on.
        horovod: Horovod's module for it.
        may_follow: prefixes of its errors' names that another rank's end may cause.
        surroundings: errors that come from a rank's surroundings, not from its code.
    """

    model: str
    transformer: str
    packages: tuple[str, ...]
    horovod: str
    may_follow: tuple[str, ...] = ()
    surroundings: tuple[str, ...] = ()


# By the dotted name of the engine.
FRAMEWORKS = {
    KERAS: _Framework(
        model="Keras model",
        transformer="TFTransformer",
        packages=("tensorflow", "keras"),
        horovod="horovod.tensorflow",
        # Of several types, around that of Horovod.
        may_follow=("tensorflow.",),
        surroundings=tuple(
            f"tensorflow.python.framework.errors_impl.{name}Error"
            for name in ("Aborted", "Internal", "Unavailable")
        ),
    ),
    TORCH: _Framework(
        model="PyTorch module",
        transformer="TorchTransformer",
        packages=("torch",),
        horovod="horovod.torch",
    ),
}


def model_of(engine: str) -> str:
    """Return the name of an engine's models in messages; the engine may be a user's."""
    framework = FRAMEWORKS.get(engine)
    return f"model of the engine {engine!r}" if framework is None else framework.model


def transformer_of(engine: str) -> str:
    """Return the name of the public class of an engine's models."""
    return FRAMEWORKS.get(engine, FRAMEWORKS[KERAS]).transformer


def modules_to_preload() -> dict[str, tuple[str, ...]]:
    """Return the modules worth importing before a call arrives, by the package it mentions."""
    return {
        package: (*framework.packages[: number + 1], framework.horovod)
        for framework in FRAMEWORKS.values()
        for number, package in enumerate(framework.packages)
    }


def frameworks_of(modules: Collection[str]) -> list[str]:
    """Return the engines of the frameworks that the modules belong to."""
    packages = {*modules, *(module.partition(".")[0] for module in modules)}
    return [
        engine
        for engine, framework in FRAMEWORKS.items()
        if packages & {*framework.packages, framework.horovod}
    ]


@functools.cache
def _load_triton() -> None:
    """Load Triton's library, if it is installed and TensorFlow has not been imported yet.

    PyTorch for CUDA imports it late, in an optimizer's first step, say. Both libraries contain
    LLVM, and the process crashes where TensorFlow's was loaded first.
    """
    found = None if "tensorflow" in sys.modules else importlib.util.find_spec("triton")
    for folder in (found and found.submodule_search_locations) or ():
        with contextlib.suppress(OSError):  # another release may have none
            ctypes.CDLL(os.path.join(folder, "_C", "libtriton.so"))


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress output of native code to standard error, unless the imports fail.

    TensorFlow's C++ libraries print some notices before any of their settings can stop them.
    Garbage collection is paused: it is a quarter of TensorFlow's import, and frees nothing.
    """
    _load_triton()
    collects = gc.isenabled()
    gc.disable()
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(saved, held.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            if collects:
                gc.enable()
