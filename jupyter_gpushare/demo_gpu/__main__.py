"""GPU work as a job: ``python -m jupyter_gpushare.demo_gpu train``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jupyter_gpushare import demo_gpu
from jupyter_gpushare.errors import GpuShareError


@dataclass(frozen=True, slots=True)
class _Progress:
    """Prints a line now and then and appends each finished step to a file."""

    steps: int
    file: Path | None

    def __call__(self, step: int) -> None:
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(f"{step}\n")
        if step == self.steps or step % max(1, self.steps // 20) == 0:
            print(f"step {step} of {self.steps}", flush=True)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jupyter_gpushare.demo_gpu", description="GPU work for a demonstration."
    )
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "train", help="do training steps on GPU memory and check that each was applied exactly once"
    )
    command.add_argument("--steps", type=_positive, default=100, help="how many (default %(default)s)")
    command.add_argument("--step-s", type=float, default=0.1, help="seconds per step (default %(default)s)")
    command.add_argument(
        "--bytes", default="1GiB", help="memory on each GPU, e.g. 6GiB (default %(default)s)"
    )
    command.add_argument(
        "--devices", type=_positive, help="how many GPUs (default: all this process may use)"
    )
    command.add_argument(
        "--steps-file", type=Path, help="append the number of each finished step to this file"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done and correct, 1 the GPU refused or the memory is wrong, 2 usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        n_bytes = demo_gpu.parse_bytes(options.bytes)
    except ValueError as error:
        parser.error(str(error))
    try:
        buffers = [
            demo_gpu.open(device).allocate(n_bytes)
            for device in range(options.devices or demo_gpu.device_count())
        ]
        for buffer in buffers:
            buffer.fill(seed=buffer.gpu.device + 1)
            print(f"{demo_gpu.gib(n_bytes)} on {buffer.gpu.name}", flush=True)
        demo_gpu.train(buffers, options.steps, options.step_s, _Progress(options.steps, options.steps_file))
        intact = all(buffer.is_intact() for buffer in buffers)
    except GpuShareError as error:
        print(f"demo_gpu: {error}", file=sys.stderr)
        return 1
    print("every step was applied exactly once" if intact else "the GPU memory is not what it should be")
    return 0 if intact else 1


if __name__ == "__main__":
    sys.exit(main())
