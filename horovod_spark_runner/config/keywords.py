"""Suggest the argument that an unknown keyword stands for."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ParamSpec, TypeVar

from ..errors import InvalidInputError

P = ParamSpec("P")
R = TypeVar("R")
# How to set each argument of a call, and each setting within one, by its name in snake_case.
Usage = Mapping[str, str]
# Names that other programs have for this package's arguments. A name may stand for several: the
# first one that the call has counts.
_ALIASES = {
    "num_workers": "np num_proc num_procs num_processes nproc n_procs num_ranks world_size "
    "num_slots parallelism cluster_size num_executors partitions max_np max_num_proc",
    "workers_per_trial": "num_workers np num_proc num_processes",
    "gpus_per_worker": "use_gpu use_gpus gpu gpus num_gpus device",
    "stream_logs": "verbose verbosity driver_log_verbosity silent stdout stderr "
    "prefix_output_with_timestamp",
    "model_fn": "model build_fn model_builder torch_obj network",
    "module": "model model_fn net network torch_obj",
    "loss": "criterion loss_fn",
    "learning_rate": "lr optimizer_params",
    "train_step": "train_minibatch_fn",
    "batch_size": "batch batch_size_per_worker train_batch_size per_device_train_batch_size "
    "mini_batch",
    "predict_batch_size": "batch_size",
    "epochs": "num_epochs nb_epoch n_epochs max_epochs num_train_epochs",
    "steps_per_epoch": "train_steps_per_epoch",
    "validation": "validation_split validation_data val_data validation_fraction validation_pct",
    "sample_weight_col": "sample_weight weight_col weights",
    "features_col": "input_col",
    "feature_cols": "x features features_col feature_columns input_col input_cols input_mapping "
    "continuous_cols categorical_cols",
    "label_cols": "y labels label_col target label_columns",
    "columns": "cols feature_cols features_col input_cols input_col",
    "prediction_col": "output_cols output_col prediction_cols output_mapping",
    "output_form": "use_vector_out",
    "shapes": "input_shapes label_shapes",
    "transforms": "transformation_fn transform_fn",
    "run_dir": "store checkpoint_dir output_dir model_dir work_dir log_dir run_id path",
    "study_dir": "run_dir store output_dir log_dir work_dir",
    "data_dir": "run_dir store work_dir tfrecord_dir",
    "seed": "random_seed random_state",
    "compression": "gradient_compression",
    "direction": "mode",
    "sync": "mode",
    "env": "backend_env environment",
    "network_interface": "nics",
    "parameters": "extra_mpi_args",
    "allow_unencrypted": "_ssl_conf",
    "min_workers": "min_np min_num_proc",
    "max_restarts": "reset_limit max_retries",
    "start_timeout": "elastic_timeout reservation_timeout",
    "signature": "signature_def_key",
    "space": "search_space param_space params",
    "max_trials": "n_trials max_evals num_samples",
    "parallel": "parallelism n_jobs max_concurrent_trials",
}
# What does an argument's work here, by other programs' names. Braces hold a name of
# this package's argument.
_ADVICE = {
    "optimizer loss metrics learning_rate loss_weights loss_constructors": "the model that "
    "{model_fn} returns brings it (Keras: model.compile; PyTorch: TorchModel)",
    "local_mode": "a session of SparkSession.builder.master('local[2]') runs ranks on this machine",
    "backend use_mpi use_gloo use_barrier": "ranks are started by mpirun, in a barrier stage of "
    "the Spark session",
    "executable": "ranks run in the executors' Python, which PYSPARK_PYTHON sets",
    "fn main map_fun train_fn train_object args kwargs tf_args tf_argv": "HorovodRunner(…)"
    ".run(function, *args, **kwargs) calls a function on every rank",
    "iters steps max_steps": "{epochs} trains on all rows so many times; {steps_per_epoch} sets "
    "the steps of an epoch",
    "initial_epoch": "the checkpoints in {run_dir} have it",
    "early_stop_patience": "{callbacks} takes keras.callbacks.EarlyStopping(patience=…), or "
    "TorchEarlyStopping(patience=…)",
    "checkpoint_callback": "every epoch leaves a checkpoint in {run_dir}; {every_steps} adds more",
    "backward_passes_per_step": "the optimizer of {model_fn} accumulates gradients (Keras: "
    "gradient_accumulation_steps)",
    "val_batch_size": "validation takes {batch_size}, too",
    "validation_steps validation_steps_per_epoch": "validation takes all its rows; "
    "{validation_freq} sets how often",
    "shuffle_buffer_size shuffling_buffer_size": "rows are shuffled in a window of "
    "{window_bytes}, over blocks in random order",
    "inmemory_cache_all": "rows that fit into {window_bytes} are read from storage only once",
    "train_reader_num_workers val_reader_num_workers reader_pool_type readers "
    "partitions_per_process partition_shuffles data_module mp_start_method": "each rank reads its "
    "rows ahead by itself",
    "train_step": "TorchModel(train_step=…) takes it",
    "master_node eval_node grace_secs feed_timeout": "ranks are all alike and end by themselves",
    "num_ps driver_ps_nodes": "ranks exchange gradients without parameter servers; "
    "sync=AsyncServer(…) of run_training trains asynchronously",
    "input_mode": "ranks read the rows of run_training, or of prepare_dataset, from storage",
    "tensorboard": "tensorboard --logdir RUN_DIR/events shows a run",
    "export_dir export_fn": "model.export(path) of the trained model writes it",
}


def _by_alias(table: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for meaning, aliases in table.items():
        for alias in aliases.split():
            found.setdefault(alias, []).append(meaning)
    return found


_MEANINGS = _by_alias(_ALIASES)
_SENTENCES = {name: text for names, text in _ADVICE.items() for name in names.split()}


def check_keywords(
    call: str, within: Callable[[], Usage] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that refuses unknown keywords of a call, and suggests the right ones.

    Args:
        call: its name.
        within: returns how to set what is not an argument of the call, but within one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = inspect.signature(function).parameters.keys() - {"self", "cls"}

        @functools.wraps(function)
        def checked(*args: P.args, **keywords: P.kwargs) -> R:
            for name in keywords:
                if name not in names:
                    own, inner = usage_of(function), within() if within else {}
                    # Its own count, and come first.
                    raise unknown_argument(call, name, {**own, **inner, **own})
            return function(*args, **keywords)

        return checked

    return decorate


def unknown_argument(call: str, name: str, usage: Usage) -> InvalidInputError:
    """Return the error of a call that has no argument ``name``; it says what to use."""
    return InvalidInputError(f"{call} has no argument {name!r}; {_advice(name, usage)}")


def snake_case(name: str) -> str:
    """Return the name of a Spark ML Param as a setting: ``feature_cols`` for ``featureCols``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def usage_of(call: Callable[..., Any]) -> dict[str, str]:
    """Return how to set each argument of a call."""
    parameters = inspect.signature(call).parameters.values()
    return {
        one.name: f"{one.name}=…"
        for one in parameters
        if one.name not in ("self", "cls") and one.kind is not one.VAR_KEYWORD
    }


def usage_within(argument: str, *classes: type[object]) -> dict[str, str]:
    """Return how to set the settings of classes that an argument takes; the first one counts."""
    return {
        name: f"{argument}={cls.__name__}({how})"
        for cls in reversed(classes)
        for name, how in {**nested_usage(cls), **usage_of(cls)}.items()
    }


def nested_usage(cls: type[Any]) -> dict[str, str]:
    """Return how to set the settings of settings of a class."""
    found: dict[str, str] = {}
    for one in fields(cls):
        if is_dataclass(one.default):
            found |= usage_within(one.name, type(one.default))
    return found


def _advice(name: str, usage: Usage) -> str:
    from .training import training_usage  # of settings, whose keywords are checked here

    plain = snake_case(name)
    meanings, training = [plain, *_MEANINGS.get(plain, ())], training_usage()
    for meaning in meanings:
        if meaning in usage:
            return f"use {usage[meaning]}"
    for meaning in meanings:
        if sentence := _SENTENCES.get(meaning):
            known = {one: how.removesuffix("=…") for one, how in {**training, **usage}.items()}
            return sentence.format_map(known)
    for meaning in meanings:
        if meaning in training:
            return f"run_training takes it: {training[meaning]}"
    if close := difflib.get_close_matches(plain, usage, 1):
        return f"if {close[0]!r} is meant, use {usage[close[0]]}"
    own = [how.removesuffix("=…") for how in usage.values() if how.endswith("=…")]
    return "it has " + ", ".join(dict.fromkeys(own))
