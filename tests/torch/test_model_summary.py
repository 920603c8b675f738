"""Summary of a trained module that its signature records: layers, output shapes, parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.training.trained_model import ModelSummary, read_model

from .runs import save_run

X = Column("x", "float32", (4,))


class Own(nn.Module):
    """Has a parameter of its own, parts that return tuples and objects, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.gates = nn.GRU(4, 5, batch_first=True)
        self.packer = Packer()
        self.out = nn.Linear(5, 2)
        self.unused = nn.Linear(2, 2).requires_grad_(requires_grad=False)
        self.silent = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        states, _ = self.gates((x * self.scale)[:, None])
        return self.out(self.packer(states).value[:, 0])


class Packed:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Packer(nn.Module):
    def forward(self, x: torch.Tensor) -> Packed:
        return Packed(x)


def summary_of(place: Path, module: nn.Module) -> ModelSummary:
    save_run(place, module, [X])
    summary = read_model(RunDirectory(str(place))).signature.summary
    assert summary is not None
    assert not any(part._forward_hooks for part in module.modules())
    return summary


def test_parts_are_those_that_compute_or_have_parameters(tmp_path: Path) -> None:
    module = Own()
    summary = summary_of(tmp_path, module)
    assert [(one.name, one.kind, one.output, one.parameters) for one in summary.layers] == [
        ("", "Own", "(None, 2)", 4),
        ("gates", "GRU", "(None, 1, 5), (1, 3, 5)", 165),
        ("out", "Linear", "(None, 2)", 12),
        ("unused", "Linear", "", 6),
    ]
    assert summary.parameters == sum(one.numel() for one in module.parameters()) == 187
    assert summary.trainable == 181


def test_shared_weights_count_once_in_the_total(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    summary = summary_of(tmp_path, module)
    assert summary.parameters == 16 + 4 + 4
    assert [one.parameters for one in summary.layers] == [20, 20]


class Nested(nn.Module):
    """A tensor that has no sizes: what a part of a transformer returns where rows are padded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([x[0], x[1, :2]])


def test_an_output_without_sizes_is_no_failure(tmp_path: Path) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested = Nested()
            self.out = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            assert self.nested(torch.cat([x, x])).is_nested
            return self.out(x)

    summary = summary_of(tmp_path, Padded())
    assert [(one.name, one.output) for one in summary.layers] == [("out", "(None, 2)")]
    assert read_model(RunDirectory(str(tmp_path))).signature.outputs
