"""Ray Train with Ray Data: ray_train.py PARQUET EPOCHS OUT."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import ray
import torch
from calls import note_call
from model import SIDE, make_torch_cnn
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import distributed, nn


def to_tensors(batch):
    images = np.stack(batch["image"]).astype("float32").reshape(-1, 1, SIDE, SIDE)
    return torch.from_numpy(images), torch.from_numpy(batch["label"].astype("int64"))


def train_loop(config):
    torch.set_num_threads(1)
    module = prepare_model(make_torch_cnn())
    optimizer = torch.optim.Adam(module.parameters())
    loss_function = nn.CrossEntropyLoss()
    shard = train.get_dataset_shard("train")
    seconds = []
    for _ in range(config["epochs"]):
        began = time.perf_counter()
        batches = shard.iter_batches(
            batch_size=64, local_shuffle_buffer_size=4096, prefetch_batches=4
        )
        for batch in batches:
            images, labels = to_tensors(batch)
            optimizer.zero_grad()
            loss = loss_function(module(images), labels)
            loss.backward()
            optimizer.step()
        distributed.barrier()
        seconds.append(time.perf_counter() - began)
    if train.get_context().get_world_rank() == 0:
        torch.save(module.module.state_dict(), f"{config['out']}.pt")
        Path(config["out"]).write_text(json.dumps(seconds))


if __name__ == "__main__":
    path, epochs, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # One more slot than workers, for the tasks that read.
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    for call in range(2):
        began = time.perf_counter()
        rows = ray.data.read_parquet(path).materialize()
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"epochs": epochs, "out": out},
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=f"{out}.ray", name=f"call-{call}"),
            datasets={"train": rows},
        )
        trainer.fit()
        note_call(out, call, time.perf_counter() - began)
    ray.shutdown()
