"""A process of a lease that uses PyTorch: does what it is told, one command a line.

alloc MIB    make a tensor of random numbers         -> "alloc CODE", 2 when out of memory
check        compare every tensor with its checksum  -> "check ok" / "check bad"
step N       train a small network for N steps       -> "step LOSS"
info         what torch says about the memory        -> "info FREE TOTAL"
sleep S      sleep, without the GPU                  -> "sleep 0"
"""

from __future__ import annotations

import sys
import time
from typing import Any

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


def train(steps: int) -> float:
    network = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.Adam(network.parameters())
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = network(torch.randn(64, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss)


def main() -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    print("ready 0", flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "alloc":
            answer: object = alloc(int(words[0]))
        elif verb == "check":
            answer = check()
        elif verb == "step":
            answer = train(int(words[0]))
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
