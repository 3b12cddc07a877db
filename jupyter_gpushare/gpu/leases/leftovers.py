"""Device memory that outlives its process, because a process that it forked keeps it.

A forked process, such as a worker of PyTorch's DataLoader, has its parent's descriptors of
``/dev/nvidia*`` until it calls exec.  When the parent ends, the driver keeps the parent's memory until the
last of these descriptors is closed (NVIDIA-NeMo/Megatron-Bridge pull request 5984: 51 descriptors,
1,135 MiB).  It then lists the dead process (GaTech-RL2/EgoVerse pull request 682) or no process.

So every sample remembers what each process held.  When a process with memory ends, its *keepers* are the
younger living processes that have its image and an open device, but no GPU state of their own.
Keepers may be killed, so none is named while a device of the lease does not say who has memory there.

The memory is charged to the lease, up to the bytes that the device shows of no living process.  It is
forgotten once the device has not shown them for `HIDDEN_SETTLES_S`, because used bytes and processes are
read one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest

from jupyter_gpushare.gpu.driver.nvml import DeviceReading
from jupyter_gpushare.gpu.leases.devices import HIDDEN_SETTLES_S, DeviceStates
from jupyter_gpushare.gpu.leases.journal import Leftover
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.processes import Process, Processes
from jupyter_gpushare.gpu.os.device_files import DeviceFiles
from jupyter_gpushare.gpu.os.process_memory import ProcessMemoryReader
from jupyter_gpushare.gpu.os.processes import Key

# Of each lease, at most this many dead processes are remembered (those with the most memory), and at most
# this many living ones are checked for an open device.
MAX_TRACKED = 64
# Fewer bytes may be the driver's own.
MIN_BYTES = 64 << 20

Living = Mapping[str, tuple[Process, ...]]  # by lease


class Leftovers:
    """Finds the memory that dead processes left; `Sampler` calls it with each sample, in its thread."""

    def __init__(self, processes: Processes, files: DeviceFiles, devices: DeviceStates) -> None:
        self._processes = processes
        self._files = files
        self._devices = devices
        self._images = ProcessMemoryReader(self._image)
        # Images of processes with GPU state in the last sample: they may have called exec since their first.
        self._last_images: dict[Key, tuple[int, ...]] = {}

    def find(
        self,
        leases: Sequence[HelperLease],
        living: Living,
        usages: Mapping[str, DeviceReading],
        late: Collection[str],
        at: float,
    ) -> None:
        """Note the memory of processes that ended since the last sample, and which living ones keep it.

        The sample was taken at ``at``, in seconds; the usages of ``late`` devices are older.  A process
        whose open files could not be read in time counts as a keeper until `keepers_of` checks it.

        Raises:
            OSError: no descriptor or memory is free; nothing is noted.
        """
        leftovers = {lease: self._leftovers_of(lease, living.get(lease.name, ())) for lease in leases}
        answered = usages.keys() - set(late)
        with_state = {lease: _with_state(lease, living, usages) for lease in leases}
        forks = {
            lease: self._without_siblings(
                _forks(found, living.get(lease.name, ()), with_state[lease]), living.get(lease.name, ())
            )
            for lease, found in leftovers.items()
            if found and lease.measured_at and lease.limits.keys() <= answered
        }
        users = {each.key: each.uid for found in forks.values() for each in found}
        answers = self._images.read(users) if users else {}
        keepers = {
            lease: tuple(
                each for each in found if each.key not in answers or answers[each.key].value == each.image
            )
            for lease, found in forks.items()
        }
        self._last_images = {
            process.key: self._last_image(process)
            for lease in leases
            for process in living.get(lease.name, ())
            if process.key in with_state[lease]
        }
        kept: dict[HelperLease, dict[Key, Leftover]] = {}
        for lease, found in leftovers.items():
            images = {each.image for each in keepers.get(lease, ())}
            known = lease in forks
            kept[lease] = _largest(
                {k: each for k, each in found.items() if each.image in images or not known}
            )
        shares = {uuid: self._shares(kept, uuid, usage) for uuid, usage in usages.items()}
        for lease in leases:
            held = {uuid: by_lease[lease] for uuid, by_lease in shares.items()}
            lease.leftover_bytes = {uuid: count for uuid, count in held.items() if count >= MIN_BYTES}
            devices = {uuid for each in kept[lease].values() for uuid in each.held_bytes}
            is_free = lease in forks and not lease.leftover_bytes and devices <= usages.keys()
            _note(lease, kept[lease], keepers.get(lease, ()), is_free, at)

    def _image(self, pid: int) -> tuple[int, ...]:
        """Return the image of a process that may be a keeper; empty if it is none."""
        if not self._files.are_open_in(pid) or not self._processes.is_randomized(pid):
            return ()
        return self._processes.image(pid)

    def _last_image(self, process: Process) -> tuple[int, ...]:
        """Return the image of a process now, or its last one if it has just ended."""
        now = self._processes.image(process.pid)
        return now if any(now) else self._last_images.get(process.key, process.image)

    def _without_siblings(self, found: Sequence[Process], living: tuple[Process, ...]) -> tuple[Process, ...]:
        """Return these forks without those of a living process that called exec after it was first seen."""
        others = {process.pid for process in living} - {each.pid for each in found}
        keepers: list[Process] = []
        for each in found:  # oldest first
            if each.parent in others and self._processes.image(each.parent) == each.image:
                others.add(each.pid)
            else:
                keepers.append(each)
        return tuple(keepers)

    def _leftovers_of(self, lease: HelperLease, living: tuple[Process, ...]) -> dict[Key, Leftover]:
        """Return the leftovers of a lease: those noted before, and those of processes that ended since."""
        present = {process.key for process in living}
        ended = {
            process.key: Leftover(
                pid=process.pid,
                start_ticks=process.start_ticks,
                image=image,
                held_bytes=dict(held),
            )
            for process in lease.processes
            if process.key not in present
            and (held := lease.held.get(process.key))
            and any(image := self._last_images.get(process.key, process.image))
        }
        return lease.leftovers | {key: each for key, each in ended.items() if not self._processes.alive(key)}

    def _shares(
        self, leftovers: Mapping[HelperLease, Mapping[Key, Leftover]], uuid: str, usage: DeviceReading
    ) -> dict[HelperLease, int]:
        """Return the bytes of a device that the dead processes of each lease still hold.

        The bytes that the device shows beyond those of listed processes are given out once; the lease with
        the most leftovers comes first.
        """
        counts = {
            lease: sum(each.held_bytes.get(uuid, 0) for each in found.values())
            for lease, found in leftovers.items()
        }
        if self._devices.is_blind(uuid):
            return counts
        beyond = max(0, usage.unexplained_bytes - self._devices.hidden_bytes(uuid))
        shares: dict[HelperLease, int] = {}
        for lease in sorted(counts, key=counts.__getitem__, reverse=True):
            listed = sum(usage.processes.get(pid) or 0 for pid, _ in filter(self._is_dead, leftovers[lease]))
            shares[lease] = min(counts[lease], listed + beyond)
            beyond -= max(0, shares[lease] - listed)
        return shares

    def _is_dead(self, key: Key) -> bool:
        """Return whether the pid that the driver lists is this dead process, and no later one."""
        known = self._processes.find(key[0])
        return known is None or known.key == key


def keepers_of(lease: HelperLease, processes: Processes) -> tuple[Process, ...]:
    """Return the keepers of a lease that have not called exec since they were found; they may be signalled.

    Raises:
        OSError: no descriptor or memory is free.
    """
    keepers = lease.keepers if lease.leftover_bytes else ()
    return tuple(each for each in keepers if processes.image(each.pid) == each.image)


def _note(
    lease: HelperLease, leftovers: dict[Key, Leftover], keepers: tuple[Process, ...], is_free: bool, at: float
) -> None:
    """Note the leftovers of a lease, or forget them once its devices have shown none for long enough."""
    if not is_free:
        lease.free_since = 0.0
    elif not lease.free_since or leftovers.keys() - lease.leftovers.keys():
        lease.free_since = at
    elif at - lease.free_since >= HIDDEN_SETTLES_S:  # the driver has freed it
        leftovers, keepers = {}, ()
    changed = leftovers.keys() != lease.leftovers.keys()
    lease.leftovers, lease.keepers = leftovers, keepers
    if changed:  # last: the record must have it
        lease.unsaved = True


def _largest(leftovers: Mapping[Key, Leftover]) -> dict[Key, Leftover]:
    return dict(nlargest(MAX_TRACKED, leftovers.items(), key=lambda item: sum(item[1].held_bytes.values())))


def _with_state(lease: HelperLease, living: Living, usages: Mapping[str, DeviceReading]) -> set[Key]:
    """Return the processes of a lease that have their own GPU state, or had it in the last sample."""
    pids = {pid for usage in usages.values() for pid, count in usage.processes.items() if count != 0}
    shown = (process.key for process in living.get(lease.name, ()) if process.pid in pids)
    slots = lease.account.slots if lease.account else {}
    counted = (key for key, slot in slots.items() if slot.calls or any(slot.used_bytes))
    return {*lease.held, *lease.parked, *lease.lost, *shown, *counted}


def _forks(
    leftovers: Mapping[Key, Leftover], living: tuple[Process, ...], with_state: set[Key]
) -> tuple[Process, ...]:
    """Return the living processes without GPU state that a dead process of the lease may have forked.

    A process may have the same image because a living one forked it: one that is older than the dead
    process, or has its own GPU state.  Such a process is left out, and so are those that it forked.
    """
    begun: dict[tuple[int, ...], int] = {}
    for each in leftovers.values():
        begun[each.image] = min(each.start_ticks, begun.get(each.image, each.start_ticks))
    found: list[Process] = []
    others: set[int] = set()
    for process in living:  # oldest first
        if process.image not in begun:
            continue
        is_older = process.start_ticks < begun[process.image]
        if is_older or process.parent in others or process.key in with_state:
            others.add(process.pid)
        else:
            found.append(process)
    return tuple(found[:MAX_TRACKED])
