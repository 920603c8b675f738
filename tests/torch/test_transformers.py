"""Hugging Face models and adapters, from a column of text: as in one process."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql.functions import pandas_udf
from torch import nn

from horovod_spark_runner import CheckpointOptions, RestartOptions, TorchModel, TorchTransformer
from horovod_spark_runner.testing import Fault, Faults
from tests.runs import assert_same_weights
from tests.torch.models import FaultAt
from tests.torch.test_equals_one_process import EPOCHS, GLOBAL_BATCH, ROWS, plain_torch, recorded
from tests.trainings import train

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

pytestmark = [pytest.mark.thorough, pytest.mark.mpi, pytest.mark.spark]

LENGTH, VOCABULARY = 12, 150
COLUMNS = ("input_ids", "attention_mask")
PARTS = (
    ("the old dog", "a cat", "my neighbour's horse", "the very small bird"),
    ("loves", "sees", "does not hear", "runs away from"),
    ("snow", "the red car", "music", "his own shadow in the garden"),
)
GIVEN: dict[str, Any] = {"feature_cols": [*COLUMNS], "label_cols": ["label"]}


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, int]]:
    """Sentences, some padded and some cut; the label tells the subject."""
    draw = random.Random(3)
    rows = []
    for _ in range(ROWS):
        chosen = [draw.randrange(4) for _ in PARTS]
        words = " ".join(part[number] for part, number in zip(PARTS, chosen, strict=True))
        rows.append((f"{words}.", chosen[0]))
    return rows


@pytest.fixture(scope="module")
def tokenizer(texts: list[tuple[str, int]]) -> Any:
    empty = transformers.BertTokenizerFast()
    return empty.train_new_from_iterator([text for text, _ in texts], vocab_size=VOCABULARY)


def encode(tokenizer: Any, texts: list[str], **options: Any) -> Any:
    return tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, **options)


@pytest.fixture(scope="module")
def frame(spark: Any, texts: list[tuple[str, int]], tokenizer: Any) -> Any:
    @pandas_udf("input_ids array<int>, attention_mask array<int>")
    def tokens(column: pd.Series) -> pd.DataFrame:
        encoded = encode(tokenizer, column.tolist())
        made: pd.DataFrame = pd.DataFrame({name: encoded[name] for name in COLUMNS})
        return made

    rows = spark.createDataFrame(texts, "text string, label int").repartition(2)
    return rows.select("*", tokens("text").alias("tokens")).select("text", "label", "tokens.*")


def bert_net() -> nn.Module:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=4,
        hidden_dropout_prob=0.0,  # which each rank draws for itself
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,  # so that a few steps change much
    )
    network: nn.Module = transformers.BertForSequenceClassification(config)
    return network


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def bert() -> TorchModel:
    return TorchModel(bert_net(), "CrossEntropyLoss", SGD, metrics=["accuracy"])


def bert_with_its_own_loss() -> TorchModel:
    def train_step(step: Any) -> dict[str, torch.Tensor]:
        step.optimizer.zero_grad()
        inputs = dict(zip(COLUMNS, step.inputs, strict=True))
        loss = step.module(**inputs, labels=step.labels[0]).loss
        loss.backward()
        step.optimizer.step()
        return {"loss": loss.detach()}

    return TorchModel(bert_net(), optimizer=SGD, train_step=train_step)


def lora(dropout: float = 0.0) -> TorchModel:
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=dropout
    )
    network = peft.get_peft_model(bert_net(), config)
    return TorchModel(network, "CrossEntropyLoss", SGD, metrics=["accuracy"])


def own_loss(module: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that the network itself computes from labels."""
    inputs = {name: batch[name] for name in COLUMNS}
    loss: torch.Tensor = module(**inputs, labels=batch["label"].long()).loss
    return loss


def logits(module: Any, tokenizer: Any, texts: list[str]) -> np.ndarray:
    """Return what a network gives in one process, without Spark."""
    encoded = encode(tokenizer, texts, return_tensors="pt")
    with torch.no_grad():
        output = module.eval()(**{name: encoded[name] for name in COLUMNS})
    found: np.ndarray = output.logits.numpy()
    return found


def check_steps(weights: list[np.ndarray], expected: np.ndarray) -> None:
    """Check each rank's weights after every step."""
    assert len(expected) == EPOCHS * 5
    for ours in weights:
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)
    assert np.abs(expected[-1] - expected[0]).max() > 0.05, "nothing was learnt"


def check_predictions(predicted: Any, expected: Any, tokenizer: Any) -> None:
    rows = predicted.collect()
    assert len(rows) == ROWS
    found = np.array([row.prediction for row in rows])
    ours = logits(expected, tokenizer, [row.text for row in rows])
    np.testing.assert_allclose(found, ours, rtol=0, atol=1e-4)
    assert np.ptp(found, axis=0).min() > 0.1, "all rows are predicted alike"


@pytest.mark.parametrize(
    ("model_fn", "world"), [(bert, 3), (bert_with_its_own_loss, 2)], ids=["loss", "own-loss"]
)
def test_ranks_equal_transformers(
    frame: Any, tokenizer: Any, tmp_path: Path, model_fn: Any, world: int
) -> None:
    weights, transformer = recorded(frame, tmp_path, model_fn, world, **GIVEN)
    expected = bert()
    steps = plain_torch(tmp_path / "run", expected, own_loss)
    check_steps(weights, steps)
    check_predictions(transformer.transform(frame), expected.module, tokenizer)
    # Without the code of the model, and with PyTorch alone.
    again = TorchTransformer.from_run(tmp_path / "run", trusted=True)
    check_predictions(again.transform(frame), expected.module, tokenizer)
    again.export(tmp_path / "bert.pt2")
    check_program(tmp_path / "bert.pt2", expected.module, tokenizer)


def check_program(path: Path, expected: Any, tokenizer: Any) -> None:
    program: Any = torch.export.load(path).module()
    given = ["a dog", "the old cat sees my neighbour's horse in the garden and runs away"]
    encoded = encode(tokenizer, given, return_tensors="pt")
    found = program(**{name: encoded[name].int() for name in COLUMNS})["prediction"]
    np.testing.assert_allclose(
        found.detach(), logits(expected, tokenizer, given), rtol=0, atol=1e-4
    )


def test_adapters_alone_are_trained_as_by_peft(frame: Any, tokenizer: Any, tmp_path: Path) -> None:
    weights, transformer = recorded(frame, tmp_path, lora, 2, **GIVEN)
    expected = lora()
    steps = plain_torch(tmp_path / "run", expected, own_loss)
    check_steps(weights, steps)
    check_predictions(transformer.transform(frame), expected.module, tokenizer)
    trained: Any = TorchTransformer.from_run(tmp_path / "run", model_fn=lora).getModel()
    assert isinstance(trained, peft.PeftModel)
    begun: Any = lora().module
    changed = [
        name
        for name, value in trained.named_parameters()
        if not torch.equal(value, begun.get_parameter(name))
    ]
    assert changed == [name for name, one in begun.named_parameters() if one.requires_grad]
    assert all("lora_" in name or "classifier" in name for name in changed)

    trained.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    loaded = peft.PeftModel.from_pretrained(bert_net(), tmp_path / "adapter")
    check_predictions(transformer.transform(frame), loaded, tokenizer)

    merged = trained.merge_and_unload()
    assert not any("lora" in name for name in merged.state_dict())
    example = {
        name: torch.tensor([row[name] for row in frame.take(2)], dtype=torch.int32)
        for name in COLUMNS
    }
    served = TorchTransformer.from_module(merged, example=example)
    check_predictions(served.transform(frame), expected.module, tokenizer)
    served.export(tmp_path / "merged.pt2")
    check_program(tmp_path / "merged.pt2", expected.module, tokenizer)


def test_adapters_that_are_cut_short_end_as_if_they_had_not_been(
    frame: Any, tmp_path: Path
) -> None:
    rows = frame.cache()
    given = {**GIVEN, "batch_size": GLOBAL_BATCH // 2, "epochs": EPOCHS}
    dropping = functools.partial(lora, 0.2)
    whole = train(rows, tmp_path / "whole", model_fn=dropping, **given)
    faults = Faults((Fault(8, rank=1, kind="kill"),), str(tmp_path / "notes"))
    kept = tmp_path / "run" / "checkpoints" / "step-00000006"
    run = train(
        rows,
        tmp_path / "run",
        model_fn=dropping,
        callbacks=[FaultAt(faults, kept)],
        checkpoints=CheckpointOptions(every_steps=2),
        restarts=RestartOptions(max_restarts=1, backoff_seconds=0.1),
        **given,
    )
    assert len(run.summary.attempts) == 2
    assert run.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
