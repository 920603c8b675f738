"""``horovod-spark-runner parameters``: print the page of every argument and setting."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..api import run_training
from ..config.data import DataOptions
from ..config.fields import Settings, default_of, kind_of, text_of
from ..config.launch import LaunchOptions, LaunchSettings, MpiOptions
from ..config.prediction import PredictionSettings
from ..config.sync import Allreduce, AsyncServer, DiLoCo, LocalSGD, PowerSGD, Threshold, TopK
from ..config.training import (
    CheckpointOptions,
    FitOptions,
    InitialWeights,
    MlflowOptions,
    RestartOptions,
)
from ..dataset import prepare_dataset
from ..estimator import HorovodEstimator
from ..model.params import Converter, camel_case
from ..model.torch_transformer import TorchTransformer
from ..model.transformer import TFTransformer
from ..planning.call import plan_training
from ..runner import HorovodRunner
from ..tune import tune

# Option objects of `run_training`, and their settings.
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
# Plain arguments of `run_training`.
EVERYDAY: tuple[type[Settings], ...] = (FitOptions, LaunchSettings)
# Plain arguments of other functions and classes.
_ONE_BY_ONE: dict[str, tuple[type[Settings], ...]] = {
    "run_training": EVERYDAY,
    "from_run": (PredictionSettings,),
}
_INTRODUCTION = """\
# Parameters

Printed by `horovod-spark-runner parameters`. A setting has one name everywhere and is described
once. `run_training` takes everyday settings as arguments and the others in objects, such as
`launch=LaunchOptions(stall_timeout=600)`. `HorovodRunner` takes all launch settings as arguments.
`HorovodEstimator` has Params of Spark ML (`batchSize` for `batch_size`) and takes dictionaries
(`launch={"stall_timeout": 600}`). Errors name the setting alone.
"""


def command(arguments: argparse.Namespace) -> int:
    """Print the page."""
    print(page(), end="")
    return 0


def page() -> str:
    """Return the page, in Markdown."""
    sections = [
        ("run_training", run_training, _arguments(run_training)),
        *((cls.__name__, cls, map(_entry_of, dataclasses.fields(cls))) for cls in OPTIONS),
        ("HorovodRunner", HorovodRunner, map(_entry_of, dataclasses.fields(HorovodRunner))),
        *(
            (f"{cls.__name__}.from_run", cls.from_run, _arguments(cls.from_run))
            for cls in (TFTransformer, TorchTransformer)
        ),
        ("HorovodEstimator", HorovodEstimator, _params(HorovodEstimator())),
        ("tune", tune, _arguments(tune)),
        ("plan_training", plan_training, _arguments(plan_training)),
        ("prepare_dataset", prepare_dataset, _arguments(prepare_dataset)),
    ]
    homes: dict[_Entry, str] = {}
    return "\n".join([_INTRODUCTION, *(_section(*section, homes) for section in sections)])


def _described_arguments(doc: str) -> dict[str, str]:
    """Return the descriptions of arguments in the section ``Args`` of a docstring."""
    section = re.search(r"^Args:\n((?:(?: .*)?\n)+)", f"{inspect.cleandoc(doc)}\n", re.MULTILINE)
    entries = re.split(r"^    (?=\w)", section[1] if section else "", flags=re.MULTILINE)
    pairs = (entry.partition(": ") for entry in entries if entry)
    return {name: " ".join(text.split()) for name, _, text in pairs}


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An argument or setting as the page shows it."""

    name: str
    facts: str
    text: str

    def line(self) -> str:
        """Return its line."""
        return f"- **`{self.name}`** ({self.facts}): {_markdown(self.text)}"


def _section(name: str, thing: object, entries: Iterable[_Entry], homes: dict[_Entry, str]) -> str:
    """Return a section, which refers to an earlier one for what that describes.

    Args:
        name: the title.
        thing: its first line of documentation introduces the section.
        entries: what the section describes.
        homes: the section that describes an entry, in camel case; this section's are added.
    """
    first = (inspect.getdoc(thing) or "").partition("\n")[0]
    lines: list[str] = []
    elsewhere: dict[str, list[str]] = {}
    for entry in entries:
        key = dataclasses.replace(entry, name=camel_case(entry.name))
        reference = re.fullmatch(r"see ``?(\w+)``?\.", entry.text)
        home = reference[1] if reference else homes.setdefault(key, name)
        if home == name:
            lines.append(entry.line() if entry.name else f"- and {_markdown(entry.text)}")
        else:
            elsewhere.setdefault(home, []).append(f"`{entry.name}`")
    for home, names in elsewhere.items():
        anchor = home.lower().replace(".", "")
        lines.append(f"- see [`{home}`](#{anchor}): {', '.join(names)}")
    return "\n".join([f"## {name}", "", _markdown(first), "", *lines, ""])


def _arguments(function: Callable[..., Any]) -> Iterator[_Entry]:
    """Yield an entry for each argument: of the table where it is there, else of the docstring."""
    tables = _ONE_BY_ONE.get(function.__name__, ())
    table_fields = {field.name: field for cls in tables for field in dataclasses.fields(cls)}
    texts = _described_arguments(function.__doc__ or "")
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield _Entry("", "", texts[name])
        elif name in table_fields:
            yield _entry_of(table_fields[name])
        else:
            yield _Entry(name, _facts("", parameter.default), texts[name])


def _params(stage: HorovodEstimator) -> Iterator[_Entry]:
    for param in stage.params:
        converter: Converter = param.typeConverter
        field = converter.settings.__dataclass_fields__[converter.name]
        facts = _facts(kind_of(field).words, stage.getOrDefault(param))
        yield _Entry(param.name, facts, text_of(field))


def _entry_of(field: dataclasses.Field[Any]) -> _Entry:
    return _Entry(field.name, _facts(kind_of(field).words, default_of(field)), text_of(field))


def _facts(kind: str, default: Any) -> str:
    facts = [kind] if kind else []
    if default is inspect.Parameter.empty or default is dataclasses.MISSING:
        facts.append("required")
    else:
        facts.append(f"default `{_shown(default)}`")
    return "; ".join(facts).replace("; or `None`; default `None`", "; default `None`")


def _shown(default: Any) -> str:
    if isinstance(default, Settings):
        return f"{type(default).__name__}()"
    return f'"{default}"' if isinstance(default, str) else repr(default)


def _markdown(text: str) -> str:
    names = "|".join(cls.__name__ for cls in OPTIONS)
    text = text.replace("``", "`")
    return re.sub(rf"`({names})`", lambda m: f"[`{m[1]}`](#{m[1].lower()})", text)
