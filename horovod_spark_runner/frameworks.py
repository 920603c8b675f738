"""What is known of the frameworks that there are engines for, without loading one."""

from __future__ import annotations

from dataclasses import dataclass

# Dotted names of the engines' modules, by which models, runs and checkpoints name them.
KERAS = "horovod_spark_runner.training.keras.engine"
TORCH = "horovod_spark_runner.training.torch.engine"


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        model: what a model of it is called in messages.
        transformer: name of the public class that holds its trained models.
    """

    model: str
    transformer: str


# By the dotted name of the engine.
FRAMEWORKS = {
    KERAS: Framework("Keras model", "TFTransformer"),
    TORCH: Framework("PyTorch module", "TorchTransformer"),
}


def model_of(engine: str) -> str:
    """Return what a model of an engine, which may be anybody's, is called in messages."""
    known = FRAMEWORKS.get(engine)
    return f"model of the engine {engine!r}" if known is None else known.model


def transformer_of(engine: str) -> str:
    """Return the name of the public class that holds an engine's models."""
    return FRAMEWORKS.get(engine, FRAMEWORKS[KERAS]).transformer
