"""Facts about the supported frameworks; loads none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# Dotted names of the engines' modules, by which models, runs and checkpoints name them.
KERAS = "horovod_spark_runner.engines.keras.engine"
TORCH = "horovod_spark_runner.engines.torch.engine"


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        model: what a model of it is called in messages.
        transformer: name of the public class that holds its trained models.
        packages: what it is imported as, each after those it is built on.
        horovod: Horovod's module for it.
        may_follow: how the names of its errors begin that may follow from another rank's end.
        surroundings: errors that tell of what a rank runs on, not of its code.
    """

    model: str
    transformer: str
    packages: tuple[str, ...]
    horovod: str
    may_follow: tuple[str, ...] = ()
    surroundings: tuple[str, ...] = ()


# By the dotted name of the engine.
FRAMEWORKS = {
    KERAS: Framework(
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
    TORCH: Framework(
        model="PyTorch module",
        transformer="TorchTransformer",
        packages=("torch",),
        horovod="horovod.torch",
    ),
}


def model_of(engine: str) -> str:
    """Return what a model of an engine, which may be anybody's, is called in messages."""
    framework = FRAMEWORKS.get(engine)
    return f"model of the engine {engine!r}" if framework is None else framework.model


def transformer_of(engine: str) -> str:
    """Return the name of the public class that holds an engine's models."""
    return FRAMEWORKS.get(engine, FRAMEWORKS[KERAS]).transformer


def head_starts() -> dict[str, tuple[str, ...]]:
    """Return, by the package that a call mentions, what is worth importing before it is there."""
    return {
        package: (*framework.packages[: number + 1], framework.horovod)
        for framework in FRAMEWORKS.values()
        for number, package in enumerate(framework.packages)
    }


def frameworks_of(modules: Collection[str]) -> list[str]:
    """Return the engines of the frameworks that modules to be imported are of."""
    packages = {*modules, *(module.partition(".")[0] for module in modules)}
    return [
        engine
        for engine, framework in FRAMEWORKS.items()
        if packages & {*framework.packages, framework.horovod}
    ]
