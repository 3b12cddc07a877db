"""The command line inside a notebook.

%gpu                                   my GPU: size, memory, state, what happens next
%gpujob --gpus 2 -- python train.py    `gpushare submit`, with all of its options
%%gpujob --gpus 1 --name night         the cell itself becomes the job, as a Python script
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from contextlib import closing, redirect_stderr, suppress
from typing import Any, TextIO

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from jupyter_gpushare.channel import CERTIFICATE_VARIABLE, api_url
from jupyter_gpushare.cli import main
from jupyter_gpushare.client import BlockingClient
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.messages import gibibytes, local
from jupyter_gpushare.protocol import wire


def lease_text(lease: wire.LeaseStatus | None) -> str:
    """Return two lines about a lease: numbers, and what happens next."""
    if lease is None:
        return "This server has no GPU."
    used, limit = gibibytes(lease.memory_used_bytes), gibibytes(lease.memory_limit_bytes)
    sentence = local(lease.sentence, lease.sentence_texts)
    return f"{lease.size} of {lease.device_name}: {used} of {limit}, {lease.badge}\n{sentence}"


def submit_words(line: str, cell: str | None) -> list[str]:
    """Return the arguments of `gpushare` that submit a magic's line, or its cell if there is one."""
    words = shlex.split(line)
    if cell is None:
        return ["submit", *words]
    # Another --name in the line takes precedence.
    return ["submit", "--name", "cell", *words, "--", sys.executable, "-u", "-c", cell]


class _Renamed(io.TextIOBase):
    """Writes text to another stream, with the name of the magic instead of the command's."""

    def __init__(self, magic: str, target: TextIO) -> None:
        self._magic = magic
        self._target = target

    def write(self, text: str) -> int:
        named = text.replace("gpushare submit", self._magic).replace("gpushare:", f"{self._magic}:")
        self._target.write(named)
        return len(text)

    def flush(self) -> None:
        self._target.flush()


@magics_class
class GpuMagics(Magics):
    """``%gpu``, ``%gpujob`` and ``%%gpujob``."""

    @line_magic
    def gpu(self, line: str) -> None:
        """Show the GPU of this notebook's server."""
        url, token = os.environ.get("GPUSHARE_API_URL", ""), os.environ.get("JUPYTERHUB_API_TOKEN", "")
        if not url or not token:
            print("This server was started without a GPU broker.")
            return
        pinned = os.environ.get(CERTIFICATE_VARIABLE, "")
        try:
            with closing(BlockingClient(api_url(url), token, certificate=pinned)) as client:
                status = client.get("status", wire.Status)
        except GpuShareError as error:
            print(f"No news from the GPU broker: {error}")
            return
        print(lease_text(status.lease_of(os.environ.get("JUPYTERHUB_SERVER_NAME", ""))))

    @line_cell_magic
    def gpujob(self, line: str, cell: str | None = None) -> None:
        """Submit a command, or this cell, as a training job."""
        try:
            words = submit_words(line, cell)
        except ValueError as error:
            print(f"The line cannot be parsed: {error}", file=sys.stderr)
            return
        magic = "%gpujob" if cell is None else "%%gpujob"
        # Wrong usage and --help end in SystemExit, after argparse has printed its message.
        with redirect_stderr(_Renamed(magic, sys.stderr)), suppress(SystemExit):
            main(words)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; IPython calls this when the first of them is used."""
    shell.register_magics(GpuMagics)
