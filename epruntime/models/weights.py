"""Which bytes of a checkpoint make this rank's model, and reading them in place.

headers -> WeightPlan (a slot for every parameter, checked in full before a byte is read) -> load

Tensors of other ranks' experts are left out of the plan, so they are never read. Stacked expert weights are read
tensor by tensor into the fused parameter; other conversions run one parameter at a time. No second copy of the
weights exists at any moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models.checkpoint import Checkpoint
from epruntime.models.conversions import Conversions, Stacking, natural_order
from epruntime.models.safetensors import RangeReader, TensorEntry

_SHOWN = 12
#: Tensors that a layer has only if it drafts tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2): it takes the hidden
#: state before and the next embedding. transformers ignores such layers, but only by the number that they have in
#: published checkpoints.
_DRAFTS = re.compile(r"^(.*\.layers\.\d+\.)(eh_proj|enorm|hnorm)\.")
_PREFETCH_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ExpertShard:
    """This rank's part of one experts module: logical ids in slot order, of which some may occur more than once.

    Attributes:
        firsts: slots that are read: the first one of each logical id.
        repeats: (slot, slot of `firsts` with the same id): slots that are copied in memory.
    """

    num_experts: int
    local: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not 0 <= expert < self.num_experts for expert in self.local):
            raise ValueError(f"local experts {self.local} of {self.num_experts}")

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        return tuple(slot for slot, expert in enumerate(self.local) if self.local.index(expert) == slot)

    @cached_property
    def repeats(self) -> tuple[tuple[int, int], ...]:
        first = {self.local[slot]: slot for slot in self.firsts}
        return tuple((slot, first[expert]) for slot, expert in enumerate(self.local) if first[expert] != slot)

    def runs(self) -> list[tuple[int, int, int]]:
        """Reads of `firsts`: consecutive ids in consecutive slots, as (slot, first id, last id + 1)."""
        found: list[tuple[int, int, int]] = []
        for slot in self.firsts:
            expert = self.local[slot]
            if found and found[-1][2] == expert and found[-1][0] + expert - found[-1][1] == slot:
                found[-1] = (found[-1][0], found[-1][1], expert + 1)
            else:
                found.append((slot, expert, expert + 1))
        return found

    def repeat(self, out_S: torch.Tensor) -> None:
        """Fills the slots of `repeats`, once all others of [S, ...] are there."""
        for slot, first in self.repeats:
            out_S[slot].copy_(out_S[first])


@dataclass(kw_only=True)
class _Group:
    """Checkpoint tensors that make one target, by source pattern (None: renamed only)."""

    target: str
    outputs: tuple[str, ...]
    by_pattern: dict[str | None, list[TensorEntry]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """One slice of a tensor: all of it (shard None), or the rows of local experts."""

    entry: TensorEntry
    shard: ExpertShard | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape if self.shard is None else (len(self.shard.local), *self.entry.shape[1:])

    @property
    def num_bytes(self) -> int:
        if self.shard is None:
            return self.entry.num_bytes
        return self.entry.num_bytes // self.shard.num_experts * len(self.shard.firsts)

    def _runs(self) -> list[tuple[int, int, int]]:
        return [(0, 0, (self.entry.shape or (1,))[0])] if self.shard is None else self.shard.runs()

    def prefetch(self, reader: RangeReader) -> None:
        for _, first, last in self._runs():
            reader.prefetch(self.entry, first, last)

    def into(self, reader: RangeReader, out: torch.Tensor) -> None:
        if self.shard is None:
            reader.read(self.entry, 0, (self.entry.shape or (1,))[0], out)
            return
        for slot, first, last in self._runs():
            reader.read(self.entry, first, last, out[slot : slot + last - first])
        self.shard.repeat(out)

    def tensor(self, reader: RangeReader, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=dtype)
        self.into(reader, out)
        return out


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Makes one target: `reads` by source pattern, in order; `stacking` if they can be read in place.

    Attributes:
        stacked: of these experts there is one read per pattern and logical id.
    """

    target: str
    outputs: tuple[str, ...]
    reads: dict[str | None, list[_Read]]
    stacking: Stacking | None
    stacked: ExpertShard | None = None

    @property
    def num_bytes(self) -> int:
        return sum(read.num_bytes for reads in self.reads.values() for read in reads)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class WeightPlan:
    """The reads of one rank. Making it checks every name and shape of the checkpoint.

    Args:
        shards: experts module name -> this rank's shard.

    Raises:
        CheckpointError: tensors are missing, left over, or of another shape than the configuration says.
        UnsupportedModelError: a tensor holds integers where the model has floating-point numbers.
    """

    def __init__(self, checkpoint: Checkpoint, conversions: Conversions, shards: dict[str, ExpertShard]) -> None:
        self._checkpoint, self._conversions, self._shards = checkpoint, conversions, shards
        groups, self.ignored = self._group()
        self._steps = [self._step(group) for group in groups.values()]
        made = {output for step in self._steps for output in step.outputs}
        self.missing = set(conversions.expected) - made
        absent = sorted(conversions.without_tied(self.missing), key=natural_order)
        if absent:
            raise CheckpointError(
                f"{checkpoint.path}: {len(absent)} tensors that config.json calls for are missing: {_listed(absent)}"
            )

    @property
    def num_bytes(self) -> int:
        """Tensor bytes that this rank needs."""
        return sum(step.num_bytes for step in self._steps)

    def local_shape(self, target: str) -> tuple[int, ...]:
        """Shape of a parameter on this rank."""
        full = tuple(self._conversions.expected[target].shape)
        shard = self._shard_of(target)
        return full if shard is None else (len(shard.local), *full[1:])

    def load(
        self, reader: RangeReader, put: Callable[[str, torch.Tensor], None], progress: Callable[[str, int], None]
    ) -> None:
        """Reads everything. Calls `put(name, tensor)` for each parameter.

        Also calls `progress(name, bytes so far)` before a parameter is read, and with "" after the last one.
        """
        ahead, asked = iter(self._steps), 0
        for step in self._steps:
            progress(step.target, reader.bytes_read)
            while asked < reader.bytes_read + step.num_bytes + _PREFETCH_BYTES:
                coming = next(ahead, None)
                if coming is None:
                    break
                for read in (read for reads in coming.reads.values() for read in reads):
                    read.prefetch(reader)
                asked += coming.num_bytes
            for name, tensor in self._make(step, reader).items():
                expected = self.local_shape(name) if name in self._conversions.expected else None
                if expected is None or tuple(tensor.shape) != expected:
                    raise self._misshapen(name, tensor, expected)
                put(name, tensor)
        progress("", reader.bytes_read)

    def _shard_of(self, target: str) -> ExpertShard | None:
        module, _, name = target.rpartition(".")
        shard = self._shards.get(module)
        if shard is None or not name:
            return None
        shape = self._conversions.expected[target].shape
        return shard if shape and shape[0] == shard.num_experts else None

    def _group(self) -> tuple[dict[str, _Group], list[str]]:
        groups: dict[str, _Group] = {}
        ignored: list[str] = []
        extra: list[str] = []
        drafts = tuple({match[1] for match in map(_DRAFTS.match, self._checkpoint.tensors) if match})
        for key in sorted(self._checkpoint.tensors, key=natural_order):
            place = self._conversions.destination(key)
            if place is None:
                no_part = key.startswith(drafts) or self._conversions.may_be_ignored(key)
                (ignored if no_part else extra).append(key)
                continue
            self._check_kind(self._checkpoint.tensors[key], place.target)
            group = groups.setdefault(place.target, _Group(target=place.target, outputs=place.outputs))
            group.by_pattern.setdefault(place.pattern, []).append(self._checkpoint.tensors[key])
        self._checkpoint.refuse_unlisted(ignored)
        if extra:
            raise CheckpointError(
                f"{self._checkpoint.path}: {len(extra)} tensors have no place in the model that "
                f"config.json describes: {_listed(extra)}"
            )
        return groups, ignored

    def _step(self, group: _Group) -> _Step:
        shard = self._shard_of(group.target)
        patterns = list(group.by_pattern)
        if None in patterns:
            entries = group.by_pattern[None]
            if len(patterns) > 1 or len(entries) > 1:
                names = [e.name for found in group.by_pattern.values() for e in found]
                raise CheckpointError(f"{self._checkpoint.path}: {_listed(names)} are all {group.target}")
            self._check_shape(entries[0], tuple(self._conversions.expected[group.target].shape))
            return _Step(
                target=group.target,
                outputs=group.outputs,
                stacking=None,
                reads={None: [_Read(entry=entries[0], shard=shard)]},
            )
        first = next(p for p in patterns if p is not None)
        foreign = [p for p in patterns if p not in self._conversions.sources(first)]
        if foreign:
            raise CheckpointError(f"{self._checkpoint.path}: {group.target} is made from {first} and from {foreign}")
        stacked = shard if self._conversions.stacks(first) else None
        if stacked is not None:
            self._check_stack(group, stacked, self._conversions.sources(first))
        reads: dict[str | None, list[_Read]] = {}
        for pattern, entries in group.by_pattern.items():
            if stacked is not None:
                reads[pattern] = [_Read(entry=entries[stacked.local[slot]]) for slot in stacked.firsts]
            else:
                reads[pattern] = [_Read(entry=e, shard=self._fused(e, shard, group.target)) for e in entries]
        stacking = self._conversions.stacking(first)
        step = _Step(target=group.target, outputs=group.outputs, reads=reads, stacking=stacking, stacked=stacked)
        if stacking is not None:
            self._check_stacking(step, stacking)
        else:
            self._check_conversion(step, first)
        return step

    def _check_conversion(self, step: _Step, first: str) -> None:
        """Runs a conversion that is no plain stacking on tensors without memory."""
        path, wanted = self._checkpoint.path, self._conversions.sources(first)
        foreign = [name for name in step.outputs if name not in self._conversions.expected]
        if foreign:
            raise CheckpointError(
                f"{path}: {_listed(wanted)} make what the model of config.json does not have: {_listed(foreign)}"
            )
        absent = [pattern for pattern in wanted if pattern not in step.reads]
        if absent:
            raise CheckpointError(f"{path}: {step.target} is made from {_listed(wanted)}; missing: {_listed(absent)}")
        reads = {pattern: step.reads[pattern] for pattern in wanted}
        shard = self._shard_of(step.target)
        if shard is not None:
            shapes = {read.entry.shape for found in reads.values() for read in found}
            if len(shapes) > 1:
                raise CheckpointError(f"{path}: {step.target} is made from tensors of unequal shapes {sorted(shapes)}")
            if not shard.local:
                return
        sources = {
            pattern: [(read.entry.name, _without_memory(read)) for read in found] for pattern, found in reads.items()
        }
        made = self._conversions.convert(step.target, first, sources, shape=reads[first][0].entry.shape)
        for name, tensor in made.items():
            expected = self.local_shape(name)
            if step.stacked is not None and self._shard_of(name):
                expected = (len(step.stacked.firsts), *expected[1:])
            if tuple(tensor.shape) != expected:
                raise self._misshapen(name, tensor, expected)

    def _misshapen(self, name: str, tensor: torch.Tensor, expected: tuple[int, ...] | None) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint.path}: {name} comes out with shape {tuple(tensor.shape)}, the model needs {expected}"
        )

    def _fused(self, entry: TensorEntry, shard: ExpertShard | None, target: str) -> ExpertShard | None:
        """A tensor that already holds all experts is read by rows of its first dimension."""
        if shard is None:
            return None
        if not entry.shape or entry.shape[0] != shard.num_experts:
            raise CheckpointError(
                f"{self._checkpoint.path}: {entry.name} of shape {entry.shape} makes {target}, but "
                f"its first dimension is not the {shard.num_experts} experts"
            )
        return shard

    def _check_kind(self, entry: TensorEntry, target: str) -> None:
        expected = self._conversions.expected.get(target)
        if expected is not None and expected.is_floating_point() != entry.dtype.is_floating_point:
            raise UnsupportedModelError(
                f"{self._checkpoint.path}: {entry.name} holds {entry.dtype} where the model has {expected.dtype}: "
                "integers in place of weights are quantised ones, which are not supported"
            )

    def _check_shape(self, entry: TensorEntry, expected: tuple[int, ...]) -> None:
        if entry.shape != expected:
            raise CheckpointError(
                f"{self._checkpoint.path}: {entry.name} has shape {entry.shape}, config.json calls for {expected}"
            )

    def _check_stack(self, group: _Group, shard: ExpertShard, sources: tuple[str, ...]) -> None:
        """Every source has one tensor per expert, numbered 0 to E-1."""
        for pattern in sources:
            entries = group.by_pattern.get(pattern, [])
            if len(entries) == 1 and shard.num_experts == 1:
                continue
            found = [_expert_number(entry.name, entries[0].name, entries[-1].name) for entry in entries]
            if found != list(range(shard.num_experts)):
                wanted = set(range(shard.num_experts))
                absent, extra = (
                    _listed([str(e) for e in sorted(ids)]) or "none"
                    for ids in (wanted - set(found), set(found) - wanted)
                )
                raise CheckpointError(
                    f"{self._checkpoint.path}: {group.target} needs one tensor {pattern} per expert, 0 to "
                    f"{shard.num_experts - 1}; found {len(entries)}; missing experts: {absent}; too many: {extra}"
                )

    def _check_stacking(self, step: _Step, stacking: Stacking) -> None:
        full = self._conversions.expected[step.target].shape
        count = self.local_shape(step.target)[0] if step.stacked is None else len(step.stacked.firsts)
        sizes = []
        for pattern in stacking.patterns:
            reads = step.reads.get(pattern, [])
            shapes = {read.shape for read in reads}
            if len(shapes) > 1:
                raise CheckpointError(f"{self._checkpoint.path}: experts of {step.target} differ in shape: {shapes}")
            if len(reads) != count:
                raise CheckpointError(
                    f"{self._checkpoint.path}: {step.target} needs {count} tensors {pattern}, found {len(reads)}"
                )
            sizes.append(next(iter(shapes), None))
        known = [s for s in sizes if s is not None]
        if known and (any(s[1:] != tuple(full[2:]) for s in known) or sum(s[0] for s in known) != full[1]):
            raise CheckpointError(
                f"{self._checkpoint.path}: tensors of one expert of {step.target} have shapes "
                f"{sizes}, config.json calls for {tuple(full[1:])} in all"
            )

    def _make(self, step: _Step, reader: RangeReader) -> dict[str, torch.Tensor]:
        dtype = self._conversions.dtype_of(step.target)
        if None in step.reads:
            return {step.target: step.reads[None][0].tensor(reader, dtype)}
        if step.stacking is not None:
            out = torch.empty(self.local_shape(step.target), dtype=dtype)
            slots = range(out.shape[0]) if step.stacked is None else step.stacked.firsts
            for index, slot in enumerate(slots):
                row = 0
                for pattern in step.stacking.patterns:
                    read = step.reads[pattern][index]
                    read.into(reader, out[slot, row : row + read.shape[0]])
                    row += read.shape[0]
            if step.stacked is not None:
                step.stacked.repeat(out)
            return {step.target: out}
        shard = self._shard_of(step.target)
        if shard is not None and not shard.local:
            return {
                name: torch.empty(self.local_shape(name), dtype=self._conversions.dtype_of(name))
                for name in step.outputs
            }
        first = next(p for p in step.reads if p is not None)
        sources = {
            pattern: [(read.entry.name, _reading(read, reader, dtype)) for read in reads]
            for pattern, reads in step.reads.items()
            if pattern is not None
        }
        made = self._conversions.convert(step.target, first, sources, shape=step.reads[first][0].entry.shape)
        if step.stacked is not None and step.stacked.repeats:
            rows = [step.stacked.firsts.index(step.stacked.local.index(expert)) for expert in step.stacked.local]
            made = {name: tensor[rows] if self._shard_of(name) else tensor for name, tensor in made.items()}
        return {name: tensor.to(self._conversions.dtype_of(name)).contiguous() for name, tensor in made.items()}


def _without_memory(read: _Read) -> Callable[[], torch.Tensor]:
    return lambda: torch.empty(read.shape, dtype=read.entry.dtype, device="meta")


def _reading(read: _Read, reader: RangeReader, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: read.tensor(reader, dtype)


def _expert_number(name: str, first: str, last: str) -> int:
    """The number in `name` at the place where the names of the first and the last expert differ."""
    parts = name.split(".")
    for index, (a, b) in enumerate(zip(first.split("."), last.split("."), strict=False)):
        if a != b and index < len(parts):
            match = re.search(r"\d+$", parts[index])
            return int(match[0]) if match else -1
    return -1
