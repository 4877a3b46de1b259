"""The order of stages: the known ones, what is legal, and how micro-batches take turns."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.overlap.schedule import (
    Layers,
    Op,
    Overlap,
    Stage,
    check_schedule,
    interleave,
    make_schedule,
)


SHORT = {
    "P": Stage.ATTENTION_PREPARE, "A": Stage.ATTENTION_CORE, "M": Stage.MLP, "G": Stage.GATE,
    "d": Stage.DISPATCH_START, "D": Stage.DISPATCH_FINISH, "E": Stage.EXPERTS,
    "c": Stage.COMBINE_START, "C": Stage.COMBINE_FINISH, "S": Stage.SHARED_EXPERTS,
    "O": Stage.OUTPUT,
}  # fmt: skip
LETTER = {stage: letter for letter, stage in SHORT.items()}


def text(schedule):
    """Stages by letter, "0:PAGd 1:PAGd": consecutive ones of a micro-batch together."""
    turns = itertools.groupby(schedule, key=lambda op: op.micro_batch)
    return " ".join(f"{i}:{''.join(LETTER[op.stage] for op in ops)}" for i, ops in turns)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (Overlap.NONE, "0:PAMPAGdDEcSCOPAGdDEcSCO"),
        (Overlap.SINGLE_BATCH, "0:PAMPAGdSDEcCOPAGdSDEcCO"),
        # attention, gate, dispatch | arrive, experts, combine | shared, arrive, output; in turns.
        (
            Overlap.TWO_BATCH_IN_TURNS,
            "0:PAMPAGd 1:PAMPAGd 0:DEc 1:DEc 0:SCOPAGd 1:SCOPAGd 0:DEc 1:DEc 0:SCO 1:SCO",
        ),
        # output, prepare | attention, gate | dispatch, shared | arrive, experts, combine | arrive;
        # the second micro-batch is two segments behind.
        (
            Overlap.TWO_BATCH_STAGGERED,
            "0:PAMPAGdS 1:PAMP 0:DEc 1:AG 0:C 1:dS 0:OP 1:DEc 0:AG 1:C 0:dS 1:OP 0:DEc 1:AG 0:C "
            "1:dS 0:O 1:DEcCO",
        ),
    ],
)
def test_known_orders(overlap, expected):
    layers = Layers(1, 2, num_parts=(1,) * overlap.num_micro_batches)
    assert text(make_schedule(overlap, layers)) == expected


def test_a_split_dispatch_is_sent_in_parts():
    layers = Layers(0, 1, num_parts=(2,))
    assert text(make_schedule(Overlap.NONE, layers)) == "0:PAGdDEcCdDEcSCO"
    assert text(make_schedule(Overlap.SINGLE_BATCH, layers)) == "0:PAGdSDEcCdDEcCO"


@given(
    overlap=st.sampled_from(Overlap),
    num_dense=st.integers(0, 2),
    num_moe=st.integers(0, 3),
    parts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_every_order_is_legal(overlap, num_dense, num_moe, parts):
    layers = Layers(num_dense, num_moe, num_parts=parts[: overlap.num_micro_batches])
    schedule = make_schedule(overlap, layers)
    assert len(set(schedule)) == len(schedule)


@pytest.mark.parametrize(
    ("delta", "expected"),
    [(0, "a0 b0 c0 a1 b1 a2"), (1, "a0 a1 b0 a2 b1 c0"), (3, "a0 a1 a2 b0 b1 c0")],
)
def test_micro_batches_take_turns(delta, expected):
    segments = [
        [[f"{name}{i}"] for i in range(count)] for name, count in zip("abc", (3, 2, 1), strict=True)
    ]
    assert " ".join(interleave(segments, delta=delta)) == expected


def test_what_is_not_legal_is_refused():
    layers = Layers(0, 1, num_parts=(1, 1))
    legal = list(make_schedule(Overlap.TWO_BATCH_IN_TURNS, layers))
    with pytest.raises(ValueError, match="1 are missing"):
        check_schedule(legal[:-1], layers)
    with pytest.raises(ValueError, match="one too many"):
        check_schedule([*legal, legal[0]], layers)
    with pytest.raises(ValueError, match=r"layer=7.*one too many"):
        check_schedule([Op(0, 7, Stage.GATE)], layers)
    # A chunk of a sequence reads what the chunk before it wrote.
    second_first = sorted(legal, key=lambda op: -op.micro_batch)
    with pytest.raises(ValueError, match="must run after"):
        check_schedule(second_first, layers)
