"""Reads the progress of a job from the progress bars that it prints.  Standard library only.

The progress is a share of the job's whole work.  If that is uncertain there is none, because a wrong
share is worse.  The words of a description do not count.  The form of a line, the unit of its rate and
the order of bars decide:

* A bar that does not count steps (`_UNITS`), but bytes or examples for instance, is ignored.
* A bar is open while it is unfinished and its line is neither cleared nor ended.
* A bar is nested if the cursor moves up from it, or if it starts while another bar is open.  A nested bar
  is ignored from then on; the open one shows no progress until its next update.
* A bar that restarts, or that is followed by a different bar, is ignored from then on.
* The first bar counts at once.  A later bar counts when it has run `_OUTLAST_FACTOR` times as long as all
  bars before it.
* A bar that follows ``Epoch 1/9``, on its line or later, is ignored as one of many if its total is not 9.
* A bar of steps inside numbered epochs (Keras, fastprogress) counts as a part of its epoch.

The length of the unfinished line, the number of remembered bars and the work per byte are bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_BYTES = 2048
_OUTLAST_FACTOR = 3.0
# The maximum number of ignored bars that are remembered.  A forgotten bar that returns is a later bar.
_MAX_IGNORED = 64
# A bar that several processes print goes back by less than this part of its total; it has not restarted.
_SLACK = 0.05

# The cursor moves to a line above.
_UP = re.compile(rb"\x1b\[[0-9]{0,4}[AF]")
_STYLE = re.compile(rb"\x1b\[[0-9;?]{0,16}[B-Za-z]")
# `` 45%|####      | 45/100 [00:10<00:12,  4.50it/s, loss=0.1]``: tqdm, and libraries that copy it;
# ``|####      | 45/100 [45%] in 1.2s``: alive-progress.
_NUMBER = rb"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kMGT]?)"
_TIME = rb"[0-9:?]{1,16}"
_TQDM = re.compile(
    rb"\| {0,8}" + _NUMBER + rb"/" + _NUMBER + rb" \["
    rb"(?:[0-9.]{1,6}%\]|" + _TIME + rb"(?:<" + _TIME + rb")?(?:\]|, {0,8}([^,\]]{0,64})[,\]]))"
)
_SCALE = {b"": 1.0, b"k": 1e3, b"M": 1e6, b"G": 1e9, b"T": 1e12}
_RATE = re.compile(rb"(?:[0-9.]+|\?)(?:[kMGTPEZY]? ?([A-Za-z]+)/s|[kMGTPEZY]?s/ ?([A-Za-z]+))\s*")
_UNITS = re.compile(rb"(?:it|iter|iteration|step|batch|update|epoch|round|episode|trial|fold|cell)(?:s|es)?")
# `` 22% (9 of 40) |####      | Elapsed Time``: progressbar2.
_OF = re.compile(rb"\s*[0-9]{1,3}% \(([0-9]{1,15}) of ([0-9]{1,15})\) \|")
# ``Epoch 1/3 : |####----| 10.00% [1/10 00:00<00:01]``: fastprogress.
_FAST = re.compile(rb"\|[^|]*\| [0-9.]{1,6}% \[([0-9]{1,12})/([0-9]{1,12}) " + _TIME + rb"<" + _TIME)
_FAST_EPOCH = re.compile(rb"Epoch ([0-9]{1,9})/([0-9]{1,9}) : " + _FAST.pattern)
# ``Epoch 1/3``, then `` 7/20 ━━━━━━━ 4s 200ms/step``, ``7/20 [==>...] - ETA`` or ``20/20 - 4s``: Keras.
_KERAS_EPOCH = re.compile(rb"Epoch ([0-9]{1,9})/([0-9]{1,9})")
_EPOCH_OF = re.compile(rb"\s*Epoch:? ?\[?[0-9]{1,9}/([0-9]{1,9})")
_KERAS = re.compile(rb"\s*([0-9]{1,12})/([0-9]{1,12}) (?:\xe2\x94\x81|\[[=>.]{10,60}\]|- [0-9]{1,9}m?s)")

# Two bars with the same unit and total are the same bar.
_Key = tuple[bytes, float]
_EPOCHS = b"of numbered epochs"


@dataclass(slots=True)
class _Bar:
    """The outermost bar."""

    key: _Key
    done: float
    is_first: bool
    earlier_s: float  # the seconds that bars before it have run
    is_open: bool = True
    is_covered: bool = False  # another bar has started, which may be nested in this one


class Bars:
    """Parses the output of a program as it arrives; `progress` has the result."""

    def __init__(self) -> None:
        self._rest = b""  # the unfinished line
        self._bar: _Bar | None = None
        self._is_first = True
        self._ignored: dict[_Key, None] = {}  # the newest last
        self._ran_s = 0.0  # the seconds that bars have run
        self._last: tuple[_Key, float] | None = None  # the bar of the last update, and its time
        self._unfinished: _Key | None = None  # the bar on the line of the cursor
        self._epochs = 0  # the total in the last heading of an epoch
        self._epoch: tuple[int, int] | None = None  # number and total
        self._step = (0, 0)  # done and total, in the current epoch
        self._steps: int | None = None  # of each epoch; 0 if epochs differ

    @property
    def progress(self) -> tuple[float, float] | None:
        """Return the amount done and the total, in the same unit; None if they are not known."""
        bar = self._bar
        if bar is None or bar.is_covered:
            return None
        if not bar.is_first and self._ran_s - bar.earlier_s <= _OUTLAST_FACTOR * bar.earlier_s:
            return None
        return bar.done, bar.key[1]

    def feed(self, printed: bytes, at_s: float) -> None:
        """Parse the next bytes, printed at ``at_s`` on a monotonic clock; they may end in mid-line."""
        lines = (self._rest + printed).splitlines(keepends=True)
        rest = lines.pop() if lines and lines[-1][-1:] not in b"\r\n" else b""
        for line in lines:
            if _may_have_bar(line):
                *above, last = _UP.split(line)
                self._leave_upwards(above)
                self._line(_clean(last), at_s)
            elif len(line) > 1:
                self._unfinished = None
                if self._bar is not None and not line.strip():
                    self._bar.is_open = False
            if line[-1:] == b"\n":
                self._unfinished = None
        *above, rest = _UP.split(rest)
        self._leave_upwards(above)
        self._rest = rest[-_LINE_BYTES:]
        # A bar on the unfinished line is up to date, but a new bar there may be nested in the one above.
        self._note_heading(_clean(self._rest))
        found = _plain(_clean(self._rest))
        if found is not None and (self._bar is None or self._bar.key == found[0]):
            self._update(*found, at_s)

    def _note_heading(self, line: bytes) -> None:
        if heading := _EPOCH_OF.match(line):
            self._epochs = int(heading[1])

    def _leave_upwards(self, lines: list[bytes]) -> None:
        for line in lines:
            if (found := _plain(_clean(line))) is not None:
                self._ignore(found[0])

    def _line(self, line: bytes, at_s: float) -> None:
        replaced, self._unfinished = self._unfinished, None
        self._note_heading(line)
        if (found := _plain(line)) is not None:
            key, done = found
            self._unfinished = key if done < key[1] else None
            if self._bar is not None and self._bar.key == key and replaced not in (None, key):
                self._ignore(key)  # two bars are updated in turns
            self._update(key, done, at_s)
            if self._bar is not None and self._bar.key == key:
                ends = line[-1:] == b"\n" and not line.rpartition(b"]")[2].strip()
                self._bar.is_open = done < key[1] and not ends
        elif fast := _FAST_EPOCH.match(line):
            epoch, epochs, step, steps = map(int, fast.groups())
            restarts = steps == self._step[1] and step < self._step[0]
            if (epoch, epochs) != self._epoch or restarts:
                self._begin_epoch(epoch, epochs, at_s)
            self._update_step(step, steps, at_s)
        elif head := _KERAS_EPOCH.fullmatch(line.rstrip()):
            self._begin_epoch(int(head[1]), int(head[2]), at_s)
        elif steps_of := _KERAS.match(line):
            self._update_step(int(steps_of[1]), int(steps_of[2]), at_s)

    def _begin_epoch(self, epoch: int, epochs: int, at_s: float) -> None:
        before, key = self._epoch, (_EPOCHS, float(epochs))
        self._epoch = (epoch, epochs) if 1 <= epoch <= epochs else None
        self._step = (0, 0)
        if before is None or before[1] != epochs:
            self._steps = None
        elif epoch <= before[0]:
            self._ignore(key)
        elif self._epoch is not None and self._bar is not None and self._bar.key == key:
            self._update(key, epoch - 1.0, at_s)

    def _update_step(self, step: int, steps: int, at_s: float) -> None:
        if self._epoch is None or not 0 <= step <= steps or not steps:
            return
        if self._steps is None:
            self._steps = steps
        elif self._steps != steps:
            self._steps = 0  # another bar, such as a validation's: only whole epochs are certain
        epoch, epochs = self._epoch
        key, done = (_EPOCHS, float(epochs)), epoch - 1.0
        if self._steps:
            self._step = max(self._step, (step, steps))
            done += self._step[0] / steps
        elif self._bar is not None and self._bar.key == key:
            done = max(done, self._bar.done)
        self._update(key, done, at_s)

    def _update(self, key: _Key, done: float, at_s: float) -> None:
        """Handle an update of a bar, unless it is ignored."""
        if self._last is not None and self._last[0] == key:
            self._ran_s += max(0.0, at_s - self._last[1])
        self._last = key, at_s
        if key in self._ignored:
            return
        bar = self._bar
        if bar is None and self._epochs > 1 and key[1] != self._epochs:
            self._ignore(key)
            return
        if bar is None or bar.key != key:
            if bar is not None and bar.is_open and bar.done < bar.key[1]:
                bar.is_covered = True
                self._ignore(key)
                return
            if bar is not None:
                self._ignore(bar.key)
            self._bar = _Bar(key, done, self._is_first, self._ran_s)
            self._is_first = False
        elif bar.done - done > max(bar.done / 2, _SLACK * key[1]):
            self._ignore(key)
        else:
            bar.done = max(bar.done, done)
            bar.is_covered = False

    def _ignore(self, key: _Key) -> None:
        """Ignore a bar from now on."""
        self._ignored.pop(key, None)
        self._ignored[key] = None
        if len(self._ignored) > _MAX_IGNORED:
            del self._ignored[next(iter(self._ignored))]
        if self._bar is not None and self._bar.key == key:
            self._bar = None


def _may_have_bar(line: bytes) -> bool:
    return b"/" in line or b" of " in line


def _clean(line: bytes) -> bytes:
    """Return the end of a line without colours; empty if it has no bar."""
    if not _may_have_bar(line):
        return b""
    return _STYLE.sub(b"", line[-_LINE_BYTES:]).lstrip(b" \b")


def _plain(line: bytes) -> tuple[_Key, float] | None:
    """Return the key of a bar without epochs, and the amount done."""
    if found := _TQDM.search(line):
        unit = _unit(found[5] or b"")
        if unit is None or (not unit and (found[2] or found[4])):
            return None
        done, total = float(found[1]) * _SCALE[found[2]], float(found[3]) * _SCALE[found[4]]
    elif of := _OF.match(line) or _FAST.match(line):
        unit, done, total = b"", float(of[1]), float(of[2])
    else:
        return None
    return ((unit, total), done) if done <= total and total else None


def _unit(rate: bytes) -> bytes | None:
    """Return the unit in a rate, b"" if the text is not a rate, or None if the unit is not one of steps."""
    found = _RATE.fullmatch(rate)
    if found is None:
        return None if b"/" in rate else b""
    unit: bytes = found[1] or found[2]
    return unit if _UNITS.fullmatch(unit) else None
