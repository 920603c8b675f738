"""Suggest the argument that an unknown keyword stands for."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import ParamSpec, TypeVar

from ..errors import InvalidInputError

P = ParamSpec("P")
R = TypeVar("R")
# Other programs' names for this package's arguments.
_ALIASES = {
    "num_workers": "np num_proc num_procs num_processes nproc n_procs num_ranks world_size "
    "num_slots parallelism",
    "gpus_per_worker": "use_gpu use_gpus gpu gpus num_gpus",
    "stream_logs": "verbose verbosity driver_log_verbosity silent",
    "batch_size": "batch batch_size_per_worker train_batch_size per_device_train_batch_size",
    "epochs": "num_epochs nb_epoch n_epochs max_epochs num_train_epochs",
    "steps_per_epoch": "train_steps_per_epoch",
    "validation": "validation_split validation_data val_data validation_fraction",
    "sample_weight_col": "sample_weight weight_col weights",
    "feature_cols": "x features features_col feature_columns",
    "label_cols": "y labels label_col target label_columns",
    "model_fn": "model build_fn model_builder",
    "run_dir": "store checkpoint_dir output_dir model_dir work_dir",
    "seed": "random_seed random_state",
    "prediction_col": "output_cols prediction_cols",
    "compression": "gradient_compression",
    "transforms": "transformation_fn transform_fn",
}
_KEYWORDS = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
_ADVICE = {
    **dict.fromkeys(
        ("optimizer", "loss", "metrics", "learning_rate", "lr"),
        "the model that model_fn returns brings it (Keras: model.compile; PyTorch: TorchModel)",
    ),
    "local_mode": "a session of SparkSession.builder.master('local[2]') runs ranks on this machine",
    "initial_epoch": "the checkpoints in run_dir have it",
}
# Example of each keyword, by call.
_CALLS: dict[str, dict[str, str]] = {}


def check_keywords(
    call: str, options: Mapping[str, Sequence[type]] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that refuses unknown keywords of a call, and suggests the right ones.

    Args:
        call: its name.
        options: classes of settings, by argument; ``None`` for a call that other calls' messages do
            not mention.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = [name for name in inspect.signature(function).parameters if name != "self"]
        if options is not None:
            inner = {
                one.name: f"{argument}={cls.__name__}({one.name}=…)"
                for argument, classes in options.items()
                for cls in reversed(classes)  # the first one with the setting counts
                for one in fields(cls)
            }
            _CALLS[call] = {**inner, **{name: f"{name}=…" for name in parameters}}

        @functools.wraps(function)
        def checked(*args: P.args, **keywords: P.kwargs) -> R:
            for name in keywords:
                if name not in parameters:
                    raise InvalidInputError(
                        f"{call} has no argument {name!r}; {_advice(call, name, parameters)}"
                    )
            return function(*args, **keywords)

        return checked

    return decorate


def advice_on(name: str) -> str:
    """Return how to set what other programs call ``name``; empty if it is an argument."""
    return _ADVICE.get(name, "")


def meant_by(name: str) -> str:
    """Return this package's argument that another program calls ``name``."""
    return _KEYWORDS.get(name, name)


def _advice(call: str, name: str, parameters: Sequence[str]) -> str:
    if advice := advice_on(name):
        return advice
    meant = meant_by(name)
    if meant in parameters:
        return f"give {meant}=…"
    for place in sorted(_CALLS, key=lambda one: one != call):
        if how := _CALLS[place].get(meant):
            return f"give {how}" if place == call else f"{place} takes it: {how}"
    close = difflib.get_close_matches(name, parameters, 1)
    return f"is {close[0]!r} meant?" if close else "it has " + ", ".join(parameters)
