"""A process with PyTorch state other than tensors; it runs one command per line (see `frameworks`).

loaders      a DataLoader with two persistent workers, forked after CUDA was used -> "loaders PID,PID"
batches      all their batches, compared                       -> "batches ok" / "batches bad"
capture      torch.cuda.graph of a small network               -> "capture ok" / "capture bad"
replay       the graph on new input, compared with the network -> "replay ok" / "replay bad"
compile      torch.compile of a small function, run once       -> "compile ok", or "compile no REASON"
compiled     run it again, compared with the first result      -> "compiled ok" / "compiled bad"
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tests.gpu_real.commands import serve

COUNT, WIDTH = 64, 1024

kept: dict[str, Any] = {}


class Numbers(Dataset[Any]):
    """A dataset whose item i is the number i, WIDTH times."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), index, dtype=torch.int64)


def loaders() -> str:
    kept["loader"] = DataLoader(
        Numbers(), batch_size=8, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    assert batches() == "ok"
    return ",".join(str(worker.pid) for worker in kept["loader"]._iterator._workers)


def batches() -> str:
    total = sum(int(batch.cuda().sum()) for batch in kept["loader"])
    return "ok" if total == WIDTH * COUNT * (COUNT - 1) // 2 else "bad"


def capture() -> str:
    torch.manual_seed(7)
    network = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
    source = torch.randn(64, 256, device="cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(aside):  # set up everything before a capture
        network(source)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = network(source)
    kept["graph"] = graph, network, source, result
    return replay()


def replay() -> str:
    graph, network, source, result = kept["graph"]
    source.copy_(torch.randn_like(source))
    graph.replay()
    with torch.no_grad():
        return "ok" if torch.allclose(result, network(source), rtol=1e-3, atol=1e-3) else "bad"


def function(numbers: Any) -> Any:
    return (torch.sin(numbers) * numbers + 1).relu().sum(dim=1)


def compile_() -> str:
    kept["numbers"] = torch.linspace(-3, 3, 1 << 16, device="cuda").reshape(256, 256)
    kept["compiled"] = torch.compile(function)
    try:
        kept["first"] = kept["compiled"](kept["numbers"])
    except Exception as error:  # no triton, no compiler, unsupported GPU: inductor raises many types
        return f"no {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "ok" if torch.allclose(kept["first"], function(kept["numbers"]), rtol=1e-3, atol=1e-3) else "bad"


def compiled() -> str:
    return "ok" if torch.equal(kept["compiled"](kept["numbers"]), kept["first"]) else "bad"


def main() -> None:
    if not torch.cuda.is_available():
        print(f"skip torch {torch.__version__} finds no GPU", flush=True)
        return
    torch.zeros(1, device="cuda")
    serve(
        loaders=loaders, batches=batches, capture=capture, replay=replay, compile=compile_, compiled=compiled
    )


if __name__ == "__main__":
    main()
