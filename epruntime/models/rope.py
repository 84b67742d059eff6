"""Rotary embeddings whose frequencies depend on how long the sequence is: longrope and dynamic NTK, per request.

module tree on the meta device -> wrap (known form? equal to transformers alone?) -> probe -> serve
forward: positions [1, T], the batch's lengths -> transformers' own forward, once per set of frequencies -> rows chosen

transformers takes that length from the longest position of the whole batch, and dynamic NTK keeps frequencies from one
call to the next. A served row has the length of its own sequence. Frequencies, scaling and layout stay transformers'
own code: each set is made by a call in which a further position, whose row is thrown away, says the length.

Dynamic NTK (github.com/huggingface/transformers, modeling_rope_utils.py) has as many sets as there are lengths beyond
the original one; longrope (arXiv:2402.13753) has two.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any, Protocol

import torch

from epruntime.errors import UnsupportedModelError
from epruntime.models.batch import ForwardBatch
from epruntime.models.info import LENGTH_HAS_NO_EFFECT, RopeLengths


class Sets(enum.Enum):
    """How many sets of cosines and sines a rotary embedding has for one position."""

    ONE = "length has no effect"
    TWO = "one for sequences up to the original length, one for longer ones"
    EVERY_LENGTH = "one for sequences up to the original length, and one for each longer one"


_SETS = {"longrope": Sets.TWO, "dynamic": Sets.EVERY_LENGTH}

#: Types of models whose own rotary embedding scales short and long sequences differently with every type of
#: frequencies but the default one, and whose generation in transformers computes a sequence anew when it passes the
#: original length (`prepare_inputs_for_generation`), so that all of its keys are those of a long sequence.
_PHI = frozenset({"phimoe"})


def recomputed_beyond(model_type: str) -> bool:
    """Is a sequence computed anew when it passes the original length, so that its cache changes nothing?"""
    return model_type in _PHI


def sets_of(kind: str, model_type: str) -> Sets:
    """kind: rope_type of a configuration."""
    if model_type in _PHI:
        return Sets.ONE if kind == "default" else Sets.TWO
    return _SETS.get(kind, Sets.ONE)


class _State(Protocol):
    @property
    def current(self) -> ForwardBatch: ...


class RotaryByLength:
    """Stands in for the forward of one rotary embedding module.

    Args:
        module: of transformers; one type of frequencies, or one per kind of layer.
        name: its name in the model, for errors.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._forward = module, module.forward
        self._state: _State | None = None
        self._kinds = _kinds_of(module)
        kinds = ", ".join(sorted(set(self._kinds.values())))
        self._where = f"{name} ({type(module).__name__}, {kinds})"
        self._sets = {layer: sets_of(kind, module.config.model_type) for layer, kind in self._kinds.items()}
        try:
            self._switches = {layer: self._switch(layer) for layer in self._kinds}
            with torch.device("cpu"):
                self._fresh = type(module)(copy.deepcopy(module.config))  # real numbers, for the probe and the check
        except Exception as error:  # a class of the library raises what it likes
            raise self._unknown(f"{type(error).__name__}: {error}") from error
        module.forward = self._probe

    @property
    def lengths(self) -> set[RopeLengths]:
        """How keys depend on length, one for each type that the module has."""
        return {
            RopeLengths(
                longest_original=self._switches[layer_type],
                every_length=sets is Sets.EVERY_LENGTH,
                recompute=recomputed_beyond(self._module.config.model_type),
            )
            for layer_type, sets in self._sets.items()
            if sets is not Sets.ONE
        }

    def serve(self, state: _State) -> None:
        """From here on the module computes rows of the running batch."""
        self._state = state
        self._module.forward = self._serve

    def check(self) -> None:
        """Compares rows of sequences on both sides of the original length with transformers on each of them alone.

        Raises:
            UnsupportedModelError: it is no rotary embedding of the known form.
        """
        for layer_type, sets in self._sets.items():
            if sets is Sets.ONE:
                continue
            switch, extra = self._switches[layer_type], ({} if layer_type is None else {"layer_type": layer_type})
            lengths = (min(3, switch), switch, switch + 1, switch + 9, switch + 2)
            positions = [sorted({0, length // 2, length - 1}) for length in lengths]
            try:
                alone = [self._alone(p, extra) for p in positions]
                flat_T = torch.tensor([x for p in positions for x in p])
                lengths_T = torch.tensor([n for n, p in zip(lengths, positions, strict=True) for _ in p])
                rows = _Rows(self._fresh, self._fresh.forward, sets, layer_type, switch)
                together = _parts(rows.compute(torch.zeros(1, len(flat_T), 1), flat_T[None], lengths_T, (), extra))
            except Exception as error:  # a foreign forward raises what it likes
                raise self._unknown(f"{type(error).__name__}: {error}") from error
            for i, part in enumerate(together):
                expected = torch.cat([parts[i] for parts in alone], dim=1)
                if part.shape != expected.shape or not torch.allclose(part, expected, rtol=1e-4, atol=1e-5):
                    raise self._unknown("rows of several sequences differ from those of each alone")

    def _alone(self, positions: list[int], extra: dict[str, str]) -> tuple[torch.Tensor, ...]:
        fresh = copy.deepcopy(self._fresh)
        return _parts(fresh(torch.zeros(1, len(positions), 1), torch.tensor(positions)[None], **extra))

    def _switch(self, layer_type: str | None) -> int:
        config, sets = self._module.config, self._sets[layer_type]
        if sets is Sets.EVERY_LENGTH:
            return int(self._module.original_max_seq_len)
        if sets is Sets.TWO:
            parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            return int(parameters["original_max_position_embeddings"])
        return 0

    def _unknown(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._where}: this rotary embedding depends on the longest position of the batch, and cannot be "
            f"computed request by request: {why}"
        )

    def _probe(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Shapes of one short sequence: values on the meta device choose no frequencies."""
        real = torch.zeros(position_ids.shape, dtype=position_ids.dtype)
        made = self._fresh.forward(torch.zeros(1, 1, 1, dtype=x.dtype), real, *args, **kwargs)
        moved = tuple(part.to(x.device) for part in _parts(made))
        return moved if isinstance(made, tuple) else moved[0]

    def _serve(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer_type = args[0] if args else kwargs.get("layer_type")
        sets = self._sets[layer_type]
        if sets is Sets.ONE:
            return self._forward(x, position_ids, *args, **kwargs)
        assert self._state is not None, "serve comes first"
        lengths_T = _lengths_of_rows(self._state.current)
        rows = _Rows(self._module, self._forward, sets, layer_type, self._switches[layer_type])
        return rows.compute(x, position_ids, lengths_T, args, kwargs)


class _Rows:
    """Rows of sequences of different lengths, by transformers' own `forward` of one module."""

    def __init__(
        self, module: Any, forward: Callable[..., Any], sets: Sets, layer_type: str | None, switch: int
    ) -> None:
        self._module, self._forward, self._sets, self._switch = module, forward, sets, switch
        self._prefix = "" if layer_type is None else f"{layer_type}_"

    def compute(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        lengths_T: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """position_ids [..., T] and the length of each row's sequence -> what `forward` returns, [1, T, ...] each."""

        def run(position_ids: torch.Tensor, length: int) -> Any:
            """As in a batch whose longest sequence has that length; no row is at a later position."""
            last = torch.full((*position_ids.shape[:-1], 1), length - 1, device=position_ids.device)
            self._reset()
            return self._forward(x, torch.cat((position_ids, last), dim=-1), *args, **kwargs)

        if self._sets is Sets.TWO:
            short = run(position_ids.clamp(max=self._switch - 1), self._switch)
            long = run(position_ids, self._switch + 1)
            is_long_T = lengths_T > self._switch
            return _joined(short, lambda i: _chosen(is_long_T, _parts(long)[i], _parts(short)[i]))
        lengths_T = lengths_T.clamp(min=self._switch)
        distinct = sorted(set(lengths_T.tolist()))
        if len(distinct) == 1:
            made = run(position_ids, distinct[0])
            return _joined(made, lambda i: _parts(made)[i][:, :-1])
        groups = [torch.nonzero(lengths_T == length)[:, 0] for length in distinct]
        runs = [run(position_ids[..., rows], length) for rows, length in zip(groups, distinct, strict=True)]
        order_T = torch.cat(groups).argsort()
        return _joined(runs[0], lambda i: torch.cat([_parts(made)[i][:, :-1] for made in runs], dim=1)[:, order_T])

    def _reset(self) -> None:
        """Forgets what transformers keeps from earlier calls."""
        module, prefix = self._module, self._prefix
        if self._sets is Sets.EVERY_LENGTH:
            module._buffers[f"{prefix}inv_freq"] = getattr(module, f"{prefix}original_inv_freq")
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        elif prefix:  # transformers 5.16 fails where it finds it
            vars(module).pop(f"{prefix}long_inv_freq", None)


def _lengths_of_rows(batch: ForwardBatch) -> torch.Tensor:
    """int64 [T]: the length that decides a row's frequencies; padding rows have 1."""
    assert batch.rope_lens_S is not None, "a model whose frequencies depend on length needs rope_lens_S"
    counts_S = batch.query_starts_S1.diff().long()
    lengths_T = torch.repeat_interleave(batch.rope_lens_S.long(), counts_S, output_size=batch.num_tokens)
    padding_P = torch.ones(len(batch.positions_T) - batch.num_tokens, dtype=torch.int64, device=lengths_T.device)
    lengths_T = torch.cat((lengths_T, padding_P))
    return torch.maximum(lengths_T, batch.positions_T + 1)


def _kinds_of(module: Any) -> dict[str | None, str]:
    """Kind of layer -> type of its frequencies; None stands for all layers."""
    kind = module.rope_type
    return dict(kind) if isinstance(kind, dict) else {None: kind}


def _parts(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _joined(like: Any, part: Callable[[int], torch.Tensor]) -> Any:
    parts = tuple(part(i) for i in range(len(_parts(like))))
    return parts if isinstance(like, tuple) else parts[0]


def _chosen(first_T: torch.Tensor, yes: torch.Tensor, no: torch.Tensor) -> torch.Tensor:
    mask = first_T.view(1, -1, *([1] * (yes.dim() - 2)))
    return torch.where(mask, yes[:, :-1], no[:, :-1])


def wrap(model: torch.nn.Module) -> list[RotaryByLength]:
    """Wraps the rotary embeddings of a model on the meta device whose frequencies depend on length.

    Raises:
        UnsupportedModelError: one is of no known form.
    """
    wrapped = []
    for name, module in list(model.named_modules()):
        if not isinstance(getattr(module, "rope_type", None), str | dict):
            continue
        model_type = module.config.model_type
        if any(sets_of(kind, model_type) is not Sets.ONE for kind in _kinds_of(module).values()):
            rotary = RotaryByLength(module, name)
            rotary.check()
            wrapped.append(rotary)
    return wrapped


def lengths_of(wrapped: list[RotaryByLength], *, where: str) -> RopeLengths:
    """The one rule by which a model's keys depend on the length of their sequence.

    Raises:
        UnsupportedModelError: there are several.
    """
    rules = set().union(*(rotary.lengths for rotary in wrapped))
    if len(rules) > 1:
        raise UnsupportedModelError(
            f"{where}: kinds of layers have rotary frequencies that depend on the length of a sequence in different "
            f"ways ({', '.join(sorted(map(str, rules)))}); one way is served"
        )
    return rules.pop() if rules else LENGTH_HAS_NO_EFFECT


def longest_sequence(config: Any) -> int:
    """Tokens of the longest sequence that a configuration is made for.

    Dynamic NTK: `max_position_embeddings` is the length before scaling, and `factor` says how many times that is meant.
    """
    longest = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {kind: p for kind, p in parameters.items() if isinstance(p, dict)}
    used = {kind: p for kind, p in nested.items() if kind in (getattr(config, "layer_types", None) or ())}
    chosen = list((used or nested or {"": parameters}).values())
    if all(p.get("rope_type") == "dynamic" for p in chosen):
        return int(longest * min(max(1.0, float(p.get("factor") or 1.0)) for p in chosen))
    return longest
