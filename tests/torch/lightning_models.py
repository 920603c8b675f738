"""Modules of Lightning that the tests train, here and by Lightning's own Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

lightning: Any = pytest.importorskip("lightning")
torchmetrics: Any = pytest.importorskip("torchmetrics")


class Digits(lightning.LightningModule):
    """Logs in all ways; its rate falls by steps."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        self.rate = rate
        made = {"task": "multiclass", "num_classes": 10}
        self.right = torchmetrics.Accuracy(**made)
        self.val_both = torchmetrics.MetricCollection(
            [torchmetrics.Accuracy(**made), torchmetrics.AUROC(**made)], prefix="val_"
        )
        self.called: list[str] = []

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.net(image)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        image, digit = batch
        output = self(image)
        loss = nn.functional.cross_entropy(output, digit)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if batch_idx < 2:
            self.log("early", loss, on_step=False, on_epoch=True)
        self.right(output, digit)
        self.log("right", self.right, on_step=False, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        image, digit = batch
        output = self(image)
        self.log("val_loss", nn.functional.cross_entropy(output, digit))
        self.val_both.update(output, digit)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_both.compute())
        self.val_both.reset()

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch + 1))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=self.rate, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Particular(lightning.LightningModule):
    """Does what Lightning lets a module do besides: frozen parts, buffers, metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.backbone = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.backbone.requires_grad_(requires_grad=False)
        self.backbone.eval()
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(16))
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def setup(self, stage: str) -> None:
        made = {"task": "multiclass", "num_classes": 10}
        self.head = nn.Linear(16, 10)
        nn.init.constant_(self.head.weight, 0.1)
        nn.init.zeros_(self.head.bias)
        self.both = torchmetrics.MetricCollection(
            {
                "table": torchmetrics.ConfusionMatrix(**made),
                "kappa": torchmetrics.CohenKappa(**made),
            },
            compute_groups=[["table", "kappa"]],
        )
        self.right = torchmetrics.Accuracy(**made)

    def forward(self, image: Tensor) -> Tensor:
        found: Tensor = self.head(self.backbone(image) - self.centre)
        return found

    @torch.enable_grad()
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, digit = batch
        loss = nn.functional.cross_entropy(self(image), digit)
        with torch.no_grad():
            self.centre = 0.9 * self.centre + 0.1 * self.backbone(image).mean(0)
        self.steps += 1
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone[0].requires_grad_(requires_grad=True)
        self.log("begun", float(self.current_epoch))

    def on_validation_epoch_start(self) -> None:
        self.right.reset()
        self.log("val_begun", float(self.current_epoch))
        self.log("val_mode", float(any(each.training for each in self.modules())))

    @torch.no_grad()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        image, digit = batch
        output = self(image)
        self.both.update(output, digit)
        self.right.update(output, digit)
        self.log("val_loss", nn.functional.cross_entropy(output, digit))

    def on_validation_epoch_end(self) -> None:
        found = self.both.compute()
        self.log_dict({"val_kappa": found["kappa"], "val_rows": found["table"].sum().float()})
        self.both.reset()
        self.log("val_again", self.right.compute())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
