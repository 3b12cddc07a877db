"""A process of a lease that uses PyTorch: does what it is told, one command a line.

alloc MIB    make a tensor of random numbers         -> "alloc CODE", 2 when out of memory
check        compare every tensor with its checksum  -> "check ok" / "check bad"
curve N      train from a fixed start, N steps       -> "curve DIGEST" of all losses
time N       the same loop, timed                    -> "time SECONDS"
info         what torch says about the memory        -> "info FREE TOTAL"
sleep S      sleep, without the GPU                  -> "sleep 0"
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import time
from typing import Any

# cuBLAS is only deterministic with it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

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
    """The losses of a small network trained from a fixed start, the same every time."""
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
    # Slow enough to be stopped in between: each part reads its losses back.
    for _ in range(20):
        losses += train(steps)
    return hashlib.sha256(struct.pack(f"{len(losses)}d", *losses)).hexdigest()


def timed(steps: int) -> float:
    torch.cuda.synchronize()
    began = time.monotonic()
    train(steps)
    torch.cuda.synchronize()
    return round(time.monotonic() - began, 4)


def main() -> None:
    if not torch.cuda.is_available():
        print(f"skip torch {torch.__version__} finds no GPU", flush=True)
        return
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    print("ready 0", flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "alloc":
            answer: object = alloc(int(words[0]))
        elif verb == "check":
            answer = check()
        elif verb == "curve":
            answer = curve(int(words[0]))
        elif verb == "time":
            answer = timed(int(words[0]))
        elif verb == "info":
            answer = "{} {}".format(*torch.cuda.mem_get_info())
        elif verb == "sleep":
            time.sleep(float(words[0]))
            answer = 0
        else:
            answer = "unknown"
        print(verb, answer, flush=True)


if __name__ == "__main__":
    main()
