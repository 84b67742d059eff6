"""Progress stamps: what a rank is doing now, in memory that another thread publishes.

rank's main thread -> Stamps (int64 cells) -> publisher thread (about every 100 ms) -> `beat` frame -> Stamp

A rank writes each field by itself, as one 8-byte store, and takes no lock: a step has hundreds of stamps. Who reads
in between sees the fields of two neighbouring moments. What is stuck does not change, and that is when it matters.
"""

from __future__ import annotations

import enum
import struct
from array import array
from dataclasses import dataclass

from epruntime.comm.frames import encode
from epruntime.errors import ProtocolError


class Phase(enum.IntEnum):
    """What a rank does, coarsely."""

    IDLE = 0
    CONFIGURE = 1
    LOAD = 2
    FORWARD = 3
    SAMPLE = 4
    STATS = 5
    UNLOAD = 6
    PREFLIGHT = 7


class Collective(enum.IntEnum):
    """What a rank waits for the other ranks in; NONE while it does not."""

    NONE = 0
    RENDEZVOUS = 1
    COUNTS = 2
    DISPATCH = 3
    COMBINE = 4
    BARRIER = 5


#: cells of `Stamps`, in order; the note, NUL-padded UTF-8, fills what is left.
_COUNT, _GENERATION, _PHASE, _STEP, _LAYER, _COLLECTIVE, _SEQUENCE, _NOTE = range(8)
NOTE_BYTES = 64
_LAYOUT = struct.Struct(f"<7q{NOTE_BYTES}s")
STAMP_BYTES = _LAYOUT.size
BEAT_TYPE = "beat"


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """One reading of a rank's stamps.

    Attributes:
        count: counts up with every change; equal counts mean that nothing has moved.
        generation: the membership the rank is in, -1 before the first.
        phase; note: what exactly, for example the parameter that is being loaded.
        step: number of the step while it is carried out, else -1; layer: reached in it, -1 before the first.
        collective: what it waits in; sequence: how many waits it has begun in this generation, the same on all ranks
            at the same point of a step.
    """

    count: int = 0
    generation: int = -1
    phase: Phase = Phase.IDLE
    step: int = -1
    layer: int = -1
    collective: Collective = Collective.NONE
    sequence: int = 0
    note: str = ""

    @classmethod
    def from_bytes(cls, data: bytes) -> Stamp:
        """Raises ProtocolError: not a stamp."""
        try:
            count, generation, phase, step, layer, collective, sequence, note = _LAYOUT.unpack(data)
            return cls(
                count=count,
                generation=generation,
                phase=Phase(phase),
                step=step,
                layer=layer,
                collective=Collective(collective),
                sequence=sequence,
                note=note.rstrip(b"\0").decode(errors="replace"),
            )
        except (struct.error, ValueError, TypeError) as error:
            raise ProtocolError(f"progress stamp is unreadable: {error}") from error

    @property
    def waits(self) -> bool:
        """It waits for other ranks."""
        return self.collective is not Collective.NONE

    def __str__(self) -> str:
        words = [f"step {self.step}"] if self.step >= 0 else [self.phase.name.lower()]
        if self.step >= 0 and self.phase is Phase.SAMPLE:
            words.append(f"sampling after layer {self.layer}" if self.layer >= 0 else "sampling")
        elif self.step >= 0 and self.layer >= 0:
            words.append(f"layer {self.layer}")
        if self.note:
            words[-1] += f" ({self.note})"
        if self.waits:
            words.append(f"waiting in {self.collective.name.lower()} {self.sequence}")
        return ", ".join(words)


class Stamps:
    """Where one rank writes its progress. One thread writes."""

    def __init__(self) -> None:
        # An array, because setting an item of one is a single store of 8 bytes, and cheap.
        self._cells = array("q", bytes(STAMP_BYTES))
        self._note = memoryview(self._cells).cast("B")[_NOTE * 8 :]
        self._cells[_GENERATION] = self._cells[_STEP] = self._cells[_LAYER] = -1

    @property
    def memory(self) -> memoryview:
        """The cells, `STAMP_BYTES` bytes as they are sent; stays valid for as long as it is held."""
        return memoryview(self._cells).cast("B")

    def read(self) -> Stamp:
        return Stamp.from_bytes(bytes(self.memory))

    def join(self, generation: int) -> None:
        """A new generation: waits are counted anew."""
        cells = self._cells
        cells[_GENERATION] = generation
        cells[_SEQUENCE] = 0
        cells[_COUNT] += 1

    def enter(self, phase: Phase, *, step: int = -1, note: str = "") -> None:
        """A new phase; it ends whatever wait, layer and step came before."""
        cells = self._cells
        cells[_COLLECTIVE] = Collective.NONE
        cells[_LAYER] = -1
        cells[_STEP] = step
        cells[_PHASE] = phase
        self._set_note(note)
        cells[_COUNT] += 1

    def sampling(self) -> None:
        """The layers of the step are behind it."""
        cells = self._cells
        cells[_PHASE] = Phase.SAMPLE
        cells[_COUNT] += 1

    def at_layer(self, layer: int) -> None:
        cells = self._cells
        cells[_LAYER] = layer
        cells[_COUNT] += 1

    def note(self, text: str) -> None:
        """What exactly is being done; the end of a long text is kept."""
        self._set_note(text)
        self._cells[_COUNT] += 1

    def wait(self, collective: Collective) -> None:
        """Begins to wait for other ranks. Left as it is when the wait fails, so that the failure names it."""
        cells = self._cells
        cells[_SEQUENCE] += 1
        cells[_COLLECTIVE] = collective
        cells[_COUNT] += 1

    def go_on(self) -> None:
        """The wait is over."""
        cells = self._cells
        cells[_COLLECTIVE] = 0
        cells[_COUNT] += 1

    def _set_note(self, text: str) -> None:
        if text or self._note[0]:
            data = text.encode()[-NOTE_BYTES:]
            self._note[:] = data + bytes(NOTE_BYTES - len(data))


def beat_frame() -> bytes:
    """A `beat` frame whose last `STAMP_BYTES` bytes are the stamp, to be overwritten in place."""
    frame = b"".join(encode({"type": BEAT_TYPE, "stamp": bytes(STAMP_BYTES)}))
    assert frame.endswith(bytes(STAMP_BYTES))
    return frame
