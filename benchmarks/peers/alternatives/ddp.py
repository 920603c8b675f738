"""DistributedDataParallel under torchrun, rows in memory: ddp.py PARQUET EPOCHS OUT."""

import json
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch
from model import SIDE, make_torch_cnn
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def load(path: str) -> TensorDataset:
    table = pq.read_table(path)
    images = table["image"].combine_chunks().flatten().to_numpy().reshape(-1, 1, SIDE, SIDE)
    labels = table["label"].to_numpy().astype("int64")
    return TensorDataset(torch.from_numpy(images.copy()), torch.from_numpy(labels))


def train(path: str, epochs: int, out: str) -> None:
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = load(path)
    sampler = DistributedSampler(rows)
    # Whole batches are taken out of the tensors, which is much faster than one row at a time.
    loader = DataLoader(rows, sampler=BatchSampler(sampler, 64, drop_last=False), batch_size=None)
    module = DistributedDataParallel(make_torch_cnn(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(module.parameters())
    loss_function = nn.CrossEntropyLoss()
    seconds = []
    for epoch in range(epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_function(module(images), labels)
            loss.backward()
            optimizer.step()
        distributed.barrier()
        seconds.append(time.perf_counter() - began)
    if distributed.get_rank() == 0:
        torch.save(module.module.state_dict(), f"{out}.pt")
        Path(out).write_text(json.dumps(seconds))
    distributed.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
