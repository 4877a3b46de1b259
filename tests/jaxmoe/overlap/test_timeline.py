import pytest

from jaxmoe.overlap.schedule import Stage
from jaxmoe.overlap.timeline import Place, Slice, Timeline, read_profile, stages_of


def make(what, *spans, rank=0, micro_batch=0):
    return tuple(Slice(rank, micro_batch, 0, what, start, stop) for start, stop in spans)


@pytest.mark.parametrize(
    ("computation", "exchanges", "expected"),
    [
        (make("experts", (0, 1)), (), 0.0),
        (make("experts", (0, 1)), make("dispatch", (1, 3)), 0.0),
        (make("experts", (0, 4)), make("dispatch", (1, 3)), 1.0),
        # Two exchanges at once count once, and so does the computation behind both.
        (
            make("experts", (0, 2)),
            make("dispatch", (0, 4)) + make("combine", (1, 3), micro_batch=1),
            0.5,
        ),
        # What another rank computes hides nothing.
        (
            make("experts", (0, 1)) + make("experts", (1, 5), rank=1),
            make("dispatch", (1, 3)),
            0.0,
        ),
    ],
)
def test_hidden_share(computation, exchanges, expected):
    assert Timeline(computation, exchanges).hidden_share() == expected


def test_chrome_trace_has_a_row_for_each_micro_batch_and_its_exchanges():
    timeline = Timeline(
        make("experts", (0, 1)) + make("experts", (1, 2), micro_batch=1),
        make("dispatch", (0.5, 1.5), micro_batch=1),
    )
    events = timeline.to_chrome_trace()["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = [(names[e["tid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert rows == [
        ("micro-batch 0", 0, 1e6),
        ("micro-batch 1", 1e6, 1e6),
        ("micro-batch 1 under way", 0.5e6, 1e6),
    ]


def test_stages_of_a_program():
    scope = "jit(f)/micro_batch_1/layer_3"
    hlo = f"""
  %dot.1 = f32[2] dot(%a, %b), metadata={{op_name="{scope}/attention_core/dot_general"}}
  %send = f32[2] custom-call(%c), custom_call_target="jaxmoe_loopback_dispatch_start", \
metadata={{op_name="{scope}/dispatch_start/ffi_call"}}
  ROOT %copy.2 = f32[2] copy(%c), metadata={{op_name="{scope}/dispatch_start/pad"}}
  %tail = f32[2] add(%a, %b), metadata={{op_name="jit(f)/norm/add"}}
"""
    assert stages_of(hlo) == {
        "dot.1": Place(1, 3, Stage.ATTENTION_CORE, is_exchange=False),
        "send": Place(1, 3, Stage.DISPATCH_START, is_exchange=True),
        "copy.2": Place(1, 3, Stage.DISPATCH_START, is_exchange=False),
    }


def test_a_profile_without_the_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no op of the step"):
        read_profile(tmp_path, {})
