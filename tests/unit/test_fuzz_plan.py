"""Plans and results on the wire: what goes in comes out, and anything else is a ProtocolError."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epruntime.errors import ProtocolError
from epruntime.plan import NewRequest, SamplingSpec, StepPlan, StepResult, TokenLogprobs

FUZZ = settings(max_examples=150, deadline=None)
COUNT = st.integers(0, 2**31 - 1)
IDS = st.lists(COUNT, max_size=4).map(tuple)
NUMBER = st.floats(-100, 100, width=32)

SPECS = st.builds(
    SamplingSpec, temperature=NUMBER, top_k=COUNT, top_p=NUMBER, seed=st.integers(0, 2**63 - 1), stop_ids=IDS,
    max_tokens=COUNT, logprobs=st.integers(-1, 20), prompt_logprobs=st.integers(-1, 20), min_tokens=COUNT, min_p=NUMBER,
    repetition_penalty=NUMBER, presence_penalty=NUMBER, frequency_penalty=NUMBER,
    logit_bias=st.lists(st.tuples(COUNT, NUMBER), max_size=3).map(tuple),
)  # fmt: skip
NEW = st.builds(
    NewRequest, rid=COUNT, token_ids=IDS, num_prompt_tokens=COUNT, num_computed_tokens=COUNT, block_ids=IDS,
    sampling=SPECS, num_prompt_logprobs=COUNT,
)  # fmt: skip
PLANS = st.builds(
    StepPlan, step=COUNT, generation=COUNT, placement_version=COUNT, drop=IDS, new=st.lists(NEW, max_size=2).map(tuple),
    blocks=st.dictionaries(COUNT, IDS, max_size=3), prefill=st.dictionaries(COUNT, COUNT, max_size=3), hold=IDS,
)  # fmt: skip
LOGPROBS = st.builds(
    lambda chosen, top: TokenLogprobs(
        chosen=chosen, top_ids=tuple(i for i, _ in top), top_values=tuple(v for _, v in top)
    ),
    NUMBER,
    st.lists(st.tuples(COUNT, NUMBER), max_size=3),
)


@st.composite
def results(draw: Any) -> StepResult:
    count = draw(st.integers(0, 4))
    array = st.lists(COUNT, min_size=count, max_size=count)
    return StepResult(
        step=draw(COUNT), generation=draw(COUNT), rids=np.array(draw(array), np.int64),
        tokens=np.array(draw(array), np.int32), finish=np.array([n % 4 for n in draw(array)], np.int8),
        logprobs=draw(st.dictionaries(st.integers(0, 3), LOGPROBS, max_size=2)), num_prefill_tokens=draw(COUNT),
        num_decode_tokens=draw(COUNT), errors=draw(st.dictionaries(COUNT, st.text(max_size=9), max_size=2)),
        prompt_logprobs=draw(st.dictionaries(COUNT, st.lists(LOGPROBS, max_size=2).map(tuple), max_size=2)),
    )  # fmt: skip


def _through(wire: Any) -> Any:
    """As it arrives: packed and unpacked."""
    return msgpack.unpackb(msgpack.packb(wire), strict_map_key=False)


@FUZZ
@given(PLANS)
def test_plans_come_out_as_they_went_in(plan):
    assert StepPlan.from_wire(_through(plan.to_wire())) == plan


@FUZZ
@given(results())
def test_results_come_out_as_they_went_in(result):
    got = StepResult.from_wire(_through(result.to_wire()))
    for name in StepResult.__slots__:
        assert np.array_equal(getattr(got, name), getattr(result, name)), name


JUNK = st.recursive(
    st.none() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=3) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=11) | st.dictionaries(st.integers(0, 5), inner, max_size=3),
    max_leaves=12,
)


def _set(wire: Any, path: list[int], junk: Any) -> Any:
    """`wire` with `junk` somewhere inside."""
    at = wire
    for index in path:
        if not isinstance(at, list) or not at:
            break
        index %= len(at)
        if not isinstance(at[index], list) or not at[index]:
            at[index] = junk
            return wire
        at = at[index]
    return junk


@FUZZ
@given(made=PLANS | results(), path=st.lists(st.integers(0, 20), max_size=4), junk=JUNK, whole=st.booleans())
@example(made=StepPlan(step=1), path=[], junk=[1] * 8, whole=True)
@example(made=StepPlan(step=1), path=[4], junk=[[1, b"123", 0, 0, [], 0, []]], whole=False)  # 3 bytes are no int32
def test_anything_else_is_refused(made, path, junk, whole):
    wire = junk if whole else _set(_through(made.to_wire()), path, junk)
    for kind in (StepPlan, StepResult):
        with contextlib.suppress(ProtocolError):
            kind.from_wire(wire)


@pytest.mark.parametrize("wire", [None, 7, "x", b"x" * 8, [], [1] * 3, {"step": 1}, [None] * 8, [None] * 10])
def test_what_has_another_shape_is_named(wire):
    for kind, name in ((StepPlan, "plan"), (StepResult, "result")):
        with pytest.raises(ProtocolError, match=f"a step {name} is unreadable"):
            kind.from_wire(wire)
