"""How much memory DeepEP's buffers take: the formulas of DeepEP's own size hints.

Source: `csrc/legacy/config.hpp` and `deep_ep/buffers/legacy.py` of github.com/deepseek-ai/DeepEP.
All sizes are bytes on one rank, for one exchange at a time.
"""

NORMAL_SMS = 20
"""Multiprocessors of normal dispatch and combine unless told otherwise: half send, half receive."""

NORMAL_QUEUE_TOKENS = 256
"""Tokens that a channel's queue from one rank holds."""

DISPATCH_SEND_TOKENS = {2: 24, 4: 6, 8: 6}
COMBINE_SEND_TOKENS = {2: 10, 4: 9, 8: 4}
"""Tokens that a channel sends at a time in normal mode, by number of ranks."""

_ALIGNMENT = 128
_MOST_TOP_K = 128
_MOST_SCALES = 128
_SOURCE_META = 8


def normal_bytes(row_bytes: int, num_ranks: int, *, num_sms: int = NORMAL_SMS) -> int:
    """`get_nvl_buffer_size_hint`: the queues of normal mode between the ranks of one host.

    Independent of the number of tokens. `row_bytes` is the size of the largest row that is sent.
    """
    channels = num_sms // 2 * num_ranks
    queued = channels * NORMAL_QUEUE_TOKENS
    total = channels * 5 * 4
    total += queued * (row_bytes + _SOURCE_META + _MOST_TOP_K * (8 + 4) + _MOST_SCALES * 4)
    return _round_up(total)


def low_latency_bytes(max_tokens_per_rank: int, hidden: int, num_experts: int) -> int:
    """`get_low_latency_rdma_size_hint`: a slab for every rank's tokens at every expert, twice.

    `num_experts` are those of all ranks, so that with a fixed number of experts the number of
    ranks changes nothing.
    """
    scales = hidden // 128
    dispatched = 16 + max(2 * hidden, hidden + 4 * scales)
    combined = 4 * scales + 2 * hidden
    sent = max(max_tokens_per_rank * dispatched, num_experts * max_tokens_per_rank * combined)
    received = num_experts * max_tokens_per_rank * max(dispatched, combined)
    signals = _round_up(4 * num_experts)
    total = 2 * (sent + received + signals)
    return (total + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
