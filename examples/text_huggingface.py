"""Train a small Hugging Face model on text, on two ranks of a local Spark. Nothing is downloaded.

It tells which of four packages a paragraph of the standard library's documentation is from. Run it
with ``python examples/text_huggingface.py --workers 2``. ``--lora`` then adapts it to four other
packages by low-rank adapters (peft).
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from library_texts import load_texts
from pyspark.sql import SparkSession
from pyspark.sql.functions import pandas_udf
from transformers import BertTokenizerFast, DistilBertConfig, DistilBertForSequenceClassification

from horovod_spark_runner import TorchModel, TorchTransformer, run_training

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from torch import nn

PACKAGES = ("asyncio", "email", "logging", "xml")
OTHERS = ("http", "importlib", "multiprocessing", "unittest")
LENGTH = 48


def train_tokenizer(df: DataFrame) -> BertTokenizerFast:
    """Return a tokenizer of word pieces; yours is ``AutoTokenizer.from_pretrained(…)``."""
    texts = (row["text"] for row in df.select("text").collect())
    return BertTokenizerFast().train_new_from_iterator(texts, vocab_size=3000)


def tokenize(df: DataFrame, tokenizer: BertTokenizerFast) -> DataFrame:
    """Add the columns ``input_ids`` and ``attention_mask``, arrays of `LENGTH` numbers."""

    @pandas_udf("input_ids array<int>, attention_mask array<int>")
    def encode(texts: pd.Series) -> pd.DataFrame:
        tokens = tokenizer(texts.tolist(), padding="max_length", truncation=True, max_length=LENGTH)
        return pd.DataFrame({name: tokens[name] for name in ("input_ids", "attention_mask")})

    return df.withColumn("tokens", encode("text")).select("*", "tokens.*").drop("tokens")


def make_model(vocabulary: int) -> TorchModel:
    """Return a network with random weights; called on every worker."""
    config = DistilBertConfig(
        vocab_size=vocabulary, max_position_embeddings=LENGTH, num_labels=len(PACKAGES),
        dim=64, hidden_dim=128, n_layers=1, n_heads=4,
    )  # fmt: skip
    return trainable(DistilBertForSequenceClassification(config), rate=1e-3)


def adapt_model(folder: str) -> TorchModel:
    """Return the network in ``folder`` with adapters; these and the head alone are trained."""
    from peft import LoraConfig, get_peft_model

    base = DistilBertForSequenceClassification.from_pretrained(folder, num_labels=len(OTHERS))
    adapted = ["word_embeddings", "q_lin", "v_lin"]  # other packages use other words
    lora = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=adapted)
    return trainable(get_peft_model(base, lora), rate=3e-3)


def trainable(network: nn.Module, rate: float) -> TorchModel:
    adamw = functools.partial(torch.optim.AdamW, lr=rate)
    return TorchModel(network, "CrossEntropyLoss", adamw, metrics=["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Hugging Face model on text.")
    parser.add_argument("--workers", type=int, default=2, help="ranks (2)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs (8)")
    parser.add_argument("--lora", action="store_true", help="adapt the trained model")
    parser.add_argument("--run-dir", default="runs/text-huggingface", help="run directory")
    arguments = parser.parse_args()
    session = SparkSession.builder.master(f"local[{arguments.workers}]").appName("text")
    spark = session.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    texts, others = load_texts(spark, PACKAGES), load_texts(spark, OTHERS)
    tokenizer = train_tokenizer(texts.union(others))

    def train(df: DataFrame, model_fn: Any, run_dir: str) -> TorchTransformer:
        rows, test = tokenize(df, tokenizer).randomSplit([0.8, 0.2], seed=7)
        trained: TorchTransformer = run_training(
            rows,
            model_fn,
            feature_cols=["input_ids", "attention_mask"],
            label_cols=["label"],
            num_workers=arguments.workers,
            epochs=arguments.epochs,
            batch_size=16,
            run_dir=run_dir,
        )
        print(f"Held-out accuracy: {trained.evaluate(test)['accuracy']:.3f}")
        return trained

    run_dir = arguments.run_dir
    make = functools.partial(make_model, len(tokenizer))
    model = train(texts, make, run_dir)
    model.export(f"{run_dir}/exported.pt2")
    base = TorchTransformer.from_run(run_dir, model_fn=make).getModel()
    for part in (base, tokenizer):
        part.save_pretrained(f"{run_dir}/pretrained")
    print(f"For transformers: {run_dir}/pretrained; for PyTorch alone: {run_dir}/exported.pt2")
    if arguments.lora:
        adapt = functools.partial(adapt_model, f"{run_dir}/pretrained")
        train(others, adapt, f"{run_dir}/lora")
        adapted: Any = TorchTransformer.from_run(f"{run_dir}/lora", model_fn=adapt).getModel()
        adapted.print_trainable_parameters()
        adapted.save_pretrained(f"{run_dir}/adapter")  # the adapters and the head alone
        adapted.merge_and_unload().save_pretrained(f"{run_dir}/merged")
        print(f"Adapters: {run_dir}/adapter; merged: {run_dir}/merged")
    spark.stop()


if __name__ == "__main__":
    main()
