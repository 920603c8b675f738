"""``horovod-spark-runner parameters``: prints docs/parameters.md, of every argument and setting."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..api import run_training
from ..config.compression import PowerSGD, Threshold, TopK
from ..config.data import DataOptions
from ..config.fields import Settings, default_of, kind_of, text_of
from ..config.launch import LaunchOptions, LaunchSettings, MpiOptions
from ..config.mlflow import MlflowOptions
from ..config.prediction import PredictionSettings
from ..config.sync import Allreduce, AsyncServer, DiLoCo, LocalSGD
from ..config.training import (
    CheckpointOptions,
    FitOptions,
    InitialWeights,
    RestartOptions,
)
from ..dataset import prepare_dataset
from ..estimator import HorovodEstimator
from ..model.params import Converter
from ..model.torch_transformer import TorchTransformer
from ..model.transformer import TFTransformer
from ..planning.call import plan_training
from ..runner import HorovodRunner
from ..tune import tune

# What `run_training` is given as objects, and what is inside of them.
OPTIONS: tuple[type[Settings], ...] = (
    DataOptions,
    CheckpointOptions,
    RestartOptions,
    InitialWeights,
    Allreduce,
    TopK,
    Threshold,
    PowerSGD,
    LocalSGD,
    DiLoCo,
    AsyncServer,
    LaunchOptions,
    MpiOptions,
    MlflowOptions,
)
# What `run_training` takes one by one.
EVERYDAY: tuple[type[Settings], ...] = (FitOptions, LaunchSettings)
# What is taken one by one besides, by whom.
ONE_BY_ONE: dict[str, tuple[type[Settings], ...]] = {
    "run_training": EVERYDAY,
    "from_run": (PredictionSettings,),
}
_INTRODUCTION = """\
# Parameters

Printed by `horovod-spark-runner parameters`. A setting has one name, wherever it is: `run_training`
takes what is needed every day one by one, and the rest in objects, such as
`launch=LaunchOptions(stall_timeout=600)`; `HorovodRunner` takes all that is said of launching one
by one. Those of `HorovodEstimator` are Params of Spark ML, in its way of writing (`batchSize`), and
take options as dictionaries (`launch={"stall_timeout": 600}`). Errors call a setting by its name
alone.
"""


def command(arguments: argparse.Namespace) -> int:
    """Print the page."""
    print(page(), end="")
    return 0


def page() -> str:
    """Return docs/parameters.md."""
    sections = [
        _section("run_training", run_training, _arguments(run_training)),
        *(_section(cls.__name__, cls, map(_line, dataclasses.fields(cls))) for cls in OPTIONS),
        _section("HorovodRunner", HorovodRunner, _runner()),
        _section("HorovodEstimator", HorovodEstimator, _params(HorovodEstimator())),
        _section("tune", tune, _arguments(tune)),
        _section("plan_training", plan_training, _arguments(plan_training)),
        _section("prepare_dataset", prepare_dataset, _arguments(prepare_dataset)),
        *(
            _section(f"{cls.__name__}.from_run", cls.from_run, _arguments(cls.from_run))
            for cls in (TFTransformer, TorchTransformer)
        ),
    ]
    return "\n".join([_INTRODUCTION, *sections])


def described_arguments(doc: str) -> dict[str, str]:
    """Return the descriptions of arguments in the section ``Args`` of a docstring."""
    section = re.search(r"^Args:\n((?:(?: .*)?\n)+)", f"{inspect.cleandoc(doc)}\n", re.MULTILINE)
    entries = re.split(r"^    (?=\w)", section[1] if section else "", flags=re.MULTILINE)
    pairs = (entry.partition(": ") for entry in entries if entry)
    return {name: " ".join(text.split()) for name, _, text in pairs}


def _section(name: str, thing: Any, lines: Iterator[str]) -> str:
    first = (inspect.getdoc(thing) or "").partition("\n")[0]
    return "\n".join([f"## {name}", "", _markdown(first), "", *lines, ""])


def _arguments(function: Callable[..., Any]) -> Iterator[str]:
    """Yield a line for each argument: of the table where it is there, else of the docstring."""
    tables = ONE_BY_ONE.get(function.__name__, ())
    table_fields = {field.name: field for cls in tables for field in dataclasses.fields(cls)}
    texts = described_arguments(function.__doc__ or "")
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield f"- and {_markdown(texts[name])}"
        elif name in table_fields:
            yield _line(table_fields[name])
        else:
            yield _entry(name, "", parameter.default, texts[name])


def _runner() -> Iterator[str]:
    inner = {field.name for field in dataclasses.fields(LaunchOptions)}
    yield from (_line(one) for one in dataclasses.fields(HorovodRunner) if one.name not in inner)
    yield "- and all of [`LaunchOptions`](#launchoptions)"


def _params(stage: HorovodEstimator) -> Iterator[str]:
    for param in stage.params:
        converter: Converter = param.typeConverter
        field = converter.settings.__dataclass_fields__[converter.name]
        default = stage.getOrDefault(param)
        yield _entry(param.name, kind_of(field).words, default, text_of(field))


def _line(field: dataclasses.Field[Any]) -> str:
    return _entry(field.name, kind_of(field).words, default_of(field), text_of(field))


def _entry(name: str, kind: str, default: Any, text: str) -> str:
    facts = [kind] if kind else []
    if default is inspect.Parameter.empty or default is dataclasses.MISSING:
        facts.append("required")
    else:
        facts.append(f"default `{_shown(default)}`")
    return f"- **`{name}`** ({'; '.join(facts)}): {_markdown(text)}"


def _shown(default: Any) -> str:
    if isinstance(default, Settings):
        return f"{type(default).__name__}()"
    return f'"{default}"' if isinstance(default, str) else repr(default)


def _markdown(text: str) -> str:
    names = "|".join(cls.__name__ for cls in OPTIONS)
    text = text.replace("``", "`")
    return re.sub(rf"`({names})`", lambda m: f"[`{m[1]}`](#{m[1].lower()})", text)
