"""A process that trains with PyTorch for a given time; it runs one command per line (see `frameworks`).

recorder LIBRARY  load the thread of `recorder`              -> "recorder 0"
step              the milliseconds of one step of a network of matrices  -> "step MS"
drain N           launch N such steps, record and wait       -> "drain", as `Recorded`, or "drain missing"
watch US          record and wait every US microseconds      -> "watch 0", or "watch missing"
unwatch           end that                                   -> "unwatch", as `Recorded`
time N            the loop of `torch_worker`, N small steps  -> "time SECONDS"
pipeline S        train for S seconds on pictures that a DataLoader's processes prepare
                               -> "pipeline RATE BUSY": batches a second, part of the time on the device
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tests.gpu_real.commands import serve
from tests.gpu_real.recorder import ALWAYS, Recorder
from tests.gpu_real.torch_worker import timed

WIDTH, ROWS, STEPS = 4096, 2048, 20
PICTURE, BATCH, PROCESSES = 256, 32, 4

kept: dict[str, Any] = {}


def context() -> ctypes.c_void_p:
    """Return the context that PyTorch uses."""
    found = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
    return found


def recorder(library: str) -> int:
    kept["recorder"] = Recorder(library)
    return 0


def begin() -> None:
    """Launch one step; return before the device has done it."""
    network, optimizer, inputs = kept["network"]
    optimizer.zero_grad()
    network(inputs).square().mean().backward()
    optimizer.step()


def step() -> float:
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    network = torch.nn.Sequential(*layers).cuda()
    kept["network"] = (
        network, torch.optim.SGD(network.parameters(), lr=1e-3), torch.randn(ROWS, WIDTH, device="cuda")
    )  # fmt: skip
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(STEPS):
            begin()
        torch.cuda.synchronize()
    return round(1e3 * (time.monotonic() - began) / STEPS, 3)


def drain(steps: int) -> object:
    torch.cuda.synchronize()
    for _ in range(steps):
        begin()
    return kept["recorder"].end() if kept["recorder"].start(context()) else "missing"


def watch(period_us: int) -> object:
    return 0 if kept["recorder"].start(context(), period_us, ALWAYS) else "missing"


def unwatch() -> object:
    return kept["recorder"].end(at_once=True)


class Pictures(Dataset[Any]):
    """Pictures that the processor makes, crops, rotates and scales, like pictures from files."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        picture = torch.randint(0, 256, (3, PICTURE, PICTURE), dtype=torch.uint8)
        left, top = index % 32, index // 32 % 32
        cropped = picture[:, top : top + 224, left : left + 224].float().flip(index % 2 + 1)
        return (cropped - cropped.mean()) / (cropped.std() + 1.0)


def pipeline(seconds: float) -> str:
    def block(inputs: int, outputs: int) -> Any:
        return torch.nn.Sequential(torch.nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), torch.nn.ReLU())

    layers = [block(inputs, outputs) for inputs, outputs in ((3, 64), (64, 128), (128, 256), (256, 256))]
    network = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LazyLinear(16)).cuda()
    loader = DataLoader(
        Pictures(), batch_size=BATCH, pin_memory=True, multiprocessing_context="fork",
        num_workers=max(1, min(PROCESSES, len(os.sched_getaffinity(0)) // 2)),
    )  # fmt: skip
    batches = iter(loader)
    network(next(batches).cuda())
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    spans, began = [], time.monotonic()
    while time.monotonic() < began + seconds:
        batch = next(batches)
        start, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        optimizer.zero_grad()
        network(batch.cuda(non_blocking=True)).square().mean().backward()
        optimizer.step()
        done.record()
        done.synchronize()
        spans.append((start, done))
    took_s = time.monotonic() - began
    busy_s = sum(start.elapsed_time(done) for start, done in spans) / 1e3
    return f"{len(spans) / took_s:.2f} {busy_s / took_s:.3f}"


def main() -> None:
    if not torch.cuda.is_available():
        print(f"skip torch {torch.__version__} finds no GPU", flush=True)
        return
    torch.zeros(1, device="cuda")
    serve(
        recorder=recorder, step=step, drain=drain, watch=watch, unwatch=unwatch, time=timed, pipeline=pipeline
    )


if __name__ == "__main__":
    main()
