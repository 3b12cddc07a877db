"""Check which GPUs a container sees; the pod of ``gpushare kube check --canary`` runs this."""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_gpushare.command_line import Option, Parser
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.gpu.driver.nvml import Nvml

_EXAMPLES = (
    "kubectl exec POD -- gpushare canary GPU-3f0c12ab-5a6e-4a86-9a3a-21c6a4b50d3e",
    "    see whether a pod with this package has that GPU alone",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the devices of this container; return 0 if the named device is the only one."""
    parser = Parser(
        prog="gpushare canary",
        description="Print the GPUs of this container; 0 if it sees exactly the one that is named.",
        examples=_EXAMPLES,
    )
    Option("UUID", "the one that it was told").add_to(parser)
    expected = parser.parse_args(argv).uuid
    try:
        shown = [gpu.uuid for gpu in Nvml().gpus]
    except GpuShareError as error:
        print(f"gpushare canary: {error}")
        return 1
    print(f"told {expected}, the driver shows {', '.join(shown) or 'none'}")
    return 0 if shown == [expected] else 1
