"""Published problems of NVIDIA driver branches and of programs with limits and suspension.

They come from issues of NVIDIA/cuda-checkpoint and from open-gpu-kernel-modules; this project has
seen none of them itself.  The self-test finds what fails at once; this table names what the
self-test cannot find.  `docs/isolation.md` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriverNote:
    """What is known about the driver versions that start with ``prefix``."""

    prefix: str
    note: str
    source: str
    is_warning: bool
    # Checkpoint or Restore fails in a container that has some of the machine's GPUs, so it is not tried.
    refused_in_containers: bool = False


_ISSUES = "github.com/NVIDIA/cuda-checkpoint/issues"

# The first match counts, so a longer prefix must come before a shorter one.
NOTES = (
    DriverNote(
        "570",
        "cannot checkpoint a process that uses PyTorch, "
        "nor one in a container with some of the machine's GPUs",
        f"{_ISSUES}/34",
        True,
        refused_in_containers=True,
    ),
    DriverNote(
        "575.51",
        "Checkpoint (800) or Restore fails in a container with some of the machine's GPUs, "
        "so nothing is suspended there",
        f"{_ISSUES}/24",
        True,
        refused_in_containers=True,
    ),
    DriverNote("575.57", "first version reported to suspend PyTorch", f"{_ISSUES}/34", False),
    DriverNote(
        "580",
        "a restore out of memory leaves the process checkpointed for ever; it has to be killed",
        f"{_ISSUES}/44",
        False,
    ),
    DriverNote("590", "ended jobs on 4 GPUs with SIGSEGV (A100)", f"{_ISSUES}/27", True),
    DriverNote("595.58", "does not restore jobs on 2 GPUs", f"{_ISSUES}/27", True),
    DriverNote(
        "595.71",
        "the whole machine hung about 35 s after a restored process was killed (seen with CRIU)",
        f"{_ISSUES}/53",
        True,
    ),
    DriverNote("610.57", "Lock ended processes with several threads", f"{_ISSUES}/58", True),
    DriverNote(
        "615",
        "limits the device memory of cgroups (MPS v3 memory partitioning)",
        "docs.nvidia.com/deploy/nvml-api",
        False,
    ),
)


@dataclass(frozen=True, slots=True)
class ProgramNote:
    """What is not supported for one kind of program."""

    programs: str
    note: str
    source: str


PROGRAMS = (
    ProgramNote(
        "Julia and other users of RTLD_DEEPBIND",
        "limited by the watchdog alone, not suspended",
        "docs.julialang.org/en/v1/stdlib/Libdl",
    ),
    ProgramNote(
        "AddressSanitizer",
        "refuses to start under LD_PRELOAD",
        "github.com/llvm/llvm-project, asan_linux.cpp",
    ),
    ProgramNote("CUPTI (torch.profiler)", "not suspended once it traces", f"{_ISSUES}/15"),
    ProgramNote(
        "cudf.pandas, cudf-polars, cuml.accel with their defaults; managed pools of RMM and CCCL",
        "not suspended: managed memory",
        "docs/isolation.md",
    ),
    ProgramNote("fabric handles", "not suspended", "github.com/ai-dynamo/snapshot/pull/217"),
    ProgramNote("several NCCL ranks", "not suspended", f"{_ISSUES}/30"),
    ProgramNote("64-bit Arm, every program", "not suspended: Checkpoint is for x64 alone", f"{_ISSUES}/51"),
    ProgramNote("musl (Alpine)", "gets no GPU memory", "docs/isolation.md"),
)

PERMISSION = f"Only a helper that runs as root can suspend processes ({_ISSUES}/6)."
MAINTENANCE = (
    "Stop the helper before a driver update, a reset of a GPU or a change of MIG mode: "
    "the driver refuses them while a process has the devices open."
)


def note_of(version: str) -> DriverNote | None:
    """Return the note about a driver version such as ``580.95.05``, or None if there is none."""
    numbers = version.split(".")
    return next(
        (note for note in NOTES if numbers[: note.prefix.count(".") + 1] == note.prefix.split(".")), None
    )
