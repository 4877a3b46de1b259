"""Which experts a domain's tokens go to: routed load by prompt domain and MoE layer.

The tokens are whole conversations, question and worked solution, prefilled by the model: what it
reads when it serves them. Experts are logical ones, so the placement does not matter.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from custom_calls.grouped_gemm import row_alignment
from jaxmoe import kv_cache
from jaxmoe.batch import empty_prefill
from jaxmoe.plan import DispatchMode, ExecutionPlan
from jaxmoe.step import ShardedModel, Steps
from jaxmoe.tasks import DOMAINS, evaluation_set
from jaxmoe.tokenizer import Tokenizer


ITEM_SET = "new_seeds"  # the one with all domains
ITEMS_PER_DOMAIN = 32
PAGE_SIZE = 64
TOP_SHARE = 8  # "top experts" are one in so many


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertLoad:
    """Counted choices.

    Attributes:
      counts: of each domain [L, E], how often a token of a layer went to an expert.
      num_tokens: of each domain.
    """

    counts: Mapping[str, np.ndarray]
    num_tokens: Mapping[str, int]

    @property
    def num_experts(self) -> int:
        return next(iter(self.counts.values())).shape[1]

    @property
    def num_top(self) -> int:
        return max(1, self.num_experts // TOP_SHARE)

    @property
    def total(self) -> np.ndarray:
        """All domains together, each with the same weight whatever its number of tokens."""
        return sum(
            (count / self.num_tokens[domain] for domain, count in self.counts.items()),
            start=np.zeros(next(iter(self.counts.values())).shape),
        )

    def overlap(self, first: str, second: str) -> float:
        """Share of the busiest experts that two domains have in common, mean of the layers."""
        tops = zip(*(self._top(self.counts[domain]) for domain in (first, second)), strict=True)
        return float(np.mean([len(ours & theirs) / self.num_top for ours, theirs in tops]))

    def _top(self, counts: np.ndarray) -> list[set[int]]:
        order = np.argsort(-counts, axis=-1, kind="stable")
        return [set(layer[: self.num_top].tolist()) for layer in order]

    def to_dict(self) -> dict[str, Any]:
        return {
            "domains": {
                domain: {
                    "num_tokens": self.num_tokens[domain],
                    "max_over_mean": max_over_mean(count).tolist(),
                    "counts": count.tolist(),
                }
                for domain, count in self.counts.items()
            },
            "all": {"max_over_mean": max_over_mean(self.total).tolist()},
            "num_top": self.num_top,
            "overlap": {
                f"{first}/{second}": self.overlap(first, second)
                for first, second in itertools.combinations(self.counts, 2)
            },
            "overlap_by_chance": self.num_top / self.num_experts,
        }

    def format_table(self) -> str:
        num_layers = self.total.shape[0]
        layers = "".join(f"{f'layer {layer}':>9}" for layer in range(num_layers))
        lines = [
            "expert load: the busiest expert's tokens over the mean, by MoE layer",
            f"{'domain':<12}{'tokens':>8}{layers}{'mean':>9}{'highest':>9}",
        ]
        rows = {**self.counts, "all": self.total}
        for domain, count in rows.items():
            ratios = max_over_mean(count)
            tokens = self.num_tokens.get(domain, sum(self.num_tokens.values()))
            columns = "".join(f"{ratio:>9.2f}" for ratio in ratios)
            lines.append(
                f"{domain:<12}{tokens:>8}{columns}{ratios.mean():>9.2f}{ratios.max():>9.2f}"
            )
        chance = self.num_top / self.num_experts
        lines += [
            "",
            f"the {self.num_top} busiest of {self.num_experts} experts in common, mean of the "
            f"layers ({chance:.0%} by chance)",
        ]
        for first, second in itertools.combinations(self.counts, 2):
            lines.append(f"{f'{first}, {second}':<20}{self.overlap(first, second):>8.0%}")
        return "\n".join(lines)


def max_over_mean(counts: np.ndarray) -> np.ndarray:
    """Of each layer [L]."""
    return counts.max(-1) / counts.mean(-1)


def measure_expert_load(
    model: ShardedModel,
    tokenizer: Tokenizer,
    *,
    items_per_domain: int = ITEMS_PER_DOMAIN,
) -> ExpertLoad:
    """Of the first items of each domain in `ITEM_SET`."""
    sequences = {
        domain: [
            tokenizer.apply_chat_template(
                [
                    {"role": "user", "content": item.question},
                    {"role": "assistant", "content": item.solution},
                ],
                add_generation_prompt=False,
            )
            for item in itertools.islice(
                (item for item in evaluation_set(ITEM_SET) if item.domain == domain),
                items_per_domain,
            )
        ]
        for domain in DOMAINS
    }
    plan = ExecutionPlan(
        ep_size=model.mesh.size,
        slots_per_rank=model.slots_per_rank,
        dispatch_mode=DispatchMode.NORMAL,
        row_alignment=row_alignment(),
    )
    steps = Steps(model, prefill=plan, decode=plan)
    # One shape for all, so that one program is compiled.
    longest = max(len(ids) for of_domain in sequences.values() for ids in of_domain)
    return ExpertLoad(
        counts={
            domain: count_choices(model, steps, of_domain, max_tokens=longest)
            for domain, of_domain in sequences.items()
        },
        num_tokens={domain: sum(map(len, ids)) for domain, ids in sequences.items()},
    )


def count_choices(
    model: ShardedModel,
    steps: Steps,
    sequences: Sequence[Sequence[int]],
    *,
    max_tokens: int,
) -> np.ndarray:
    """How often each expert is chosen for the tokens of these sequences, [L, E].

    Each rank prefills one sequence at a time, of at most `max_tokens`.
    """
    config, num_ranks = model.config, model.mesh.size
    num_pages = -(-max_tokens // PAGE_SIZE)
    cache = kv_cache.allocate(
        config, model.mesh, num_pages=1 + num_pages, page_size=PAGE_SIZE, dtype=model.dtype
    )
    num_layers = config.num_hidden_layers - config.first_k_dense_replace
    counts = np.zeros((num_layers, config.n_routed_experts), np.int64)
    for start in range(0, len(sequences), num_ranks):
        group = sequences[start : start + num_ranks]
        batch = empty_prefill(num_ranks, num_pages * PAGE_SIZE, num_pages)
        batch.page_ids[:] = 1 + np.arange(num_pages)  # page 0 is padding's
        batch.page_start[:] = np.arange(num_pages) * PAGE_SIZE
        for rank, ids in enumerate(group):
            here = (rank, slice(len(ids)))
            batch.token_ids[here] = ids
            batch.positions[here] = np.arange(len(ids))
            batch.slots[here] = PAGE_SIZE + np.arange(len(ids))
            batch.request[here] = 0
            batch.num_pages[rank] = -(-len(ids) // PAGE_SIZE)
            batch.page_request[rank, : batch.num_pages[rank]] = 0
        _, cache, activations = steps.forward_with_activations(cache, batch)
        for layer, topk_idx in enumerate(map(np.asarray, activations.topk_idx)):
            for rank, ids in enumerate(group):
                chosen = topk_idx[rank, : len(ids)].ravel()
                counts[layer] += np.bincount(chosen, minlength=config.n_routed_experts)
    return counts
