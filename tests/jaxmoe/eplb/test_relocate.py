"""That every slot holds its expert's weights, the same numbers, after any move."""

import numpy as np
import pytest

from jaxmoe.checkpoint import RANDOM_CONFIGS, write_random_checkpoint
from jaxmoe.eplb.relocate import plan_move
from jaxmoe.plan import Quantization
from tests.jaxmoe.eplb.relocation import draw_slots, relocate
from tests.processes import group_name, members


def write(tmp_path, name, **changes):
    write_random_checkpoint(
        tmp_path / name, RANDOM_CONFIGS[name] | changes, seed=0, dtype="float32"
    )
    return str(tmp_path / name)


def test_a_move_fetches_what_changes_from_the_own_rank_if_it_can():
    rng = np.random.default_rng(0)
    for _ in range(100):
        old, new = draw_slots(24, 12, rng), draw_slots(24, 12, rng)
        source = plan_move(old, new, slots_per_rank=4).source
        np.testing.assert_array_equal(source >= 0, old != new)
        for slot in np.flatnonzero(source >= 0):
            assert old[source[slot]] == new[slot]
            own = old[slot // 4 * 4 : slot // 4 * 4 + 4]
            assert (source[slot] // 4 == slot // 4) == (new[slot] in own)


def test_no_rank_is_asked_for_more_than_its_share_of_a_replicated_expert():
    old = np.asarray([0, 1, 0, 2, 3, 4, 5, 6])  # expert 0 on ranks 0 and 1
    new = np.asarray([0, 1, 0, 2, 0, 4, 0, 6])
    source = plan_move(np.where(new == 7, 0, old), new, slots_per_rank=2).source
    assert sorted(source[source >= 0]) == [0, 2]


def test_what_no_slot_holds_cannot_be_fetched():
    with pytest.raises(ValueError, match="no slot holds expert 3, slot 1 cannot fetch it"):
        plan_move(np.asarray([0, 1]), np.asarray([0, 3]), slots_per_rank=1)


@pytest.mark.parametrize("backend", ["reference", "loopback"])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_every_slot_has_its_experts_weights_after_every_move(tmp_path, devices, backend):
    relocate(write(tmp_path, "tiny", num_hidden_layers=3), devices, backend=backend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_weights_and_their_scales_move_too(tmp_path, dtype):
    directory = write(tmp_path, "fp8-small", num_hidden_layers=2)
    relocate(directory, 2, quantization=Quantization.FP8, dtype=dtype, num_slots=20, moves=2)


def test_weights_move_in_the_dtype_they_have(tmp_path):
    relocate(write(tmp_path, "tiny"), 4, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("num_members", [2, 4])
def test_weights_move_between_processes(tmp_path, num_members):
    directory, name = write(tmp_path, "tiny", num_hidden_layers=3), group_name()

    def told(member):
        return {
            "directory": directory, "devices": 8 // num_members, "num_members": num_members,
            "member": member, "name": name, "num_slots": 24,
        }  # fmt: skip

    which = range(num_members)
    with members("tests.jaxmoe.eplb.relocation", told, which, name=name) as processes:
        for process in processes:
            assert process.read_until("done|error")[0] == "done", process.lines
