"""What engines use of the private parts of frameworks: a release without one is noticed here."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import horovod_spark_runner

ENGINES = Path(horovod_spark_runner.__file__).parent / "engines"


def functional() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((1, 2)), np.ones((1, 1)), verbose=0)
    return model


def keras_owners() -> dict[str, tuple[Any, str]]:
    """Return, by what it is, an object and the private attributes that are used of it."""
    model = functional()
    inner = model._functional
    return {
        "model": (
            model,
            "_call_has_training_arg _compile_config _compile_loss _compile_metrics "
            "_distribute_strategy _flatten_layers _functional _initial_epoch _layers _losses "
            "_non_trainable_variables _trainable_variables",
        ),
        "functional model": (inner, "_outputs_struct"),
        "tensor": (inner.outputs[0], "_keras_history"),
        "loss": (model._compile_loss, "_flat_losses _user_loss"),
        "metrics": (model._compile_metrics, "_user_metrics"),
        "function": (keras.losses.MeanSquaredError(), "_fn_kwargs"),
        "optimizer": (model.optimizer, "_iterations _learning_rate _trainable_variables"),
        "hook": (keras.callbacks.Callback().on_epoch_end, "_is_default"),
    }


def torch_owners() -> dict[str, tuple[Any, str]]:
    torchmetrics = pytest.importorskip("torchmetrics")
    module = torch.nn.Linear(1, 1)
    return {
        "metric": (
            torchmetrics.MeanMetric(),
            "_defaults _forward_cache _reductions _update_count",
        ),
        "tensor": (torch.zeros(1), "_version"),
        "optimizer": (
            torch.optim.SGD(module.parameters(), 0.1),
            "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
        ),
        "all optimizers": (
            importlib.import_module("torch.optim.optimizer"),
            "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
        ),
        "module": (module, "_non_persistent_buffers_set"),
        "utils": (torch.utils, "_pytree"),
    }


# Of NumPy's generators of old.
OTHERS = {"_bit_generator"}


def names_used(engine: str) -> set[str]:
    """Return the private attributes in an engine's code whose names it does not define itself."""
    trees = [ast.parse(path.read_text()) for path in (ENGINES / engine).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if of_self else used).add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            used.update(ast.literal_eval(a) for a in node.args[1:2] if isinstance(a, ast.Constant))
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    return private - own - OTHERS


@pytest.mark.parametrize("engine", ["keras", "torch"])
def test_private_names_are_known_and_exist(engine: str) -> None:
    owners = keras_owners() if engine == "keras" else torch_owners()
    missing = [
        f"{name} of {kind}"
        for kind, (owner, names) in owners.items()
        for name in names.split()
        if not hasattr(owner, name)
    ]
    assert not missing
    assert names_used(engine) == {n for _, names in owners.values() for n in names.split()}
