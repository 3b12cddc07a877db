"""A process of a lease that uses PyTorch; it runs one command per line.

alloc MIB    make a tensor of random numbers         -> "alloc CODE", 2 when out of memory
check        compare every tensor with its checksum  -> "check ok" / "check bad"
curve N      train from a fixed start, N steps       -> "curve DIGEST" of all losses
time N       the same loop, timed                    -> "time SECONDS"
info         torch's free and total memory           -> "info FREE TOTAL"
sleep S      sleep, without the GPU                  -> "sleep 0"
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from typing import Any

# cuBLAS is only deterministic with it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from tests.gpu_real.commands import serve

tensors: list[tuple[Any, float]] = []


def alloc(mib: int) -> int:
    try:
        tensor = torch.randint(0, 1 << 20, (mib << 18,), dtype=torch.int32, device="cuda")
        tensors.append((tensor, int(tensor.sum(dtype=torch.int64))))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return 2
    return 0


def check() -> str:
    right = all(int(tensor.sum(dtype=torch.int64)) == total for tensor, total in tensors)
    return "ok" if right else "bad"


def train(steps: int) -> list[float]:
    """Return the losses of a small network trained from a fixed start; they are the same every time."""
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    network = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.Adam(network.parameters())
    inputs = torch.randn(4096, 256, device="cuda")
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = inputs[64 * (step % 64) : 64 * (step % 64) + 64]
        loss = (network(batch).squeeze(1) - batch.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def curve(steps: int) -> str:
    losses = train(steps)
    # Slow enough to be stopped within the loop: each part reads back its losses.
    for _ in range(20):
        losses += train(steps)
    return hashlib.sha256(struct.pack(f"{len(losses)}d", *losses)).hexdigest()


def timed(steps: int) -> float:
    torch.cuda.synchronize()
    began = time.monotonic()
    train(steps)
    torch.cuda.synchronize()
    return round(time.monotonic() - began, 4)


def info() -> str:
    return "{} {}".format(*torch.cuda.mem_get_info())


def main() -> None:
    if not torch.cuda.is_available():
        print(f"skip torch {torch.__version__} finds no GPU", flush=True)
        return
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    serve(alloc=alloc, check=check, curve=curve, time=timed, info=info)


if __name__ == "__main__":
    main()
