"""The jitted programs everything runs: one forward step, sampling, scoring.

`ShardedModel` is a model with its weights on the devices of a mesh. `Steps` holds its compiled
programs; each takes global arrays with a leading rank dimension (numpy is fine) and is compiled
once for each combination of shapes. Nothing here keeps state: the cache goes in and comes out.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.stages import Traced
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from custom_calls import runtime
from jaxmoe import kv_cache, sampling, sharding
from jaxmoe.batch import Batch, PrefillBatch, of_rank
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.load import add_load
from jaxmoe.eplb.placement import ExpertPlacement
from jaxmoe.kv_cache import KVCache
from jaxmoe.model.deepseek import Activations, DeepseekForCausalLM
from jaxmoe.plan import ExecutionPlan, Quantization, check_quantization, ep_spec
from jaxmoe.sampling import Sampled, SamplingBatch
from jaxmoe.sharding import EpRanks


SCORE_ROWS = 64  # logits of a prompt are made this many tokens at a time


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """Weights on a mesh. `params` has the structure `abstract_model` gives.

    `dtype` is that of activations and of the weights that are not quantised. The mesh holds the
    experts of `ranks`, the placement is that of all ranks.
    """

    config: ModelConfig
    mesh: Mesh
    dtype: DTypeLike
    graphdef: nnx.GraphDef
    params: nnx.State
    placement: ExpertPlacement
    ranks: EpRanks
    quantization: Quantization | None = None

    @property
    def num_slots(self) -> int:
        return self.placement.physical_to_logical.shape[1]

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.ranks.ep_size


def join_ep_group(
    model: ShardedModel,
    plans: Sequence[ExecutionPlan],
    *,
    max_tokens: int,
    members: runtime.Members | None = None,
    link: runtime.Link | None = None,
) -> runtime.EpGroup | None:
    """The expert-parallel group that these plans' steps need, of at most `max_tokens` tokens on a
    rank; None where XLA's collectives do. Raises as `custom_calls.runtime.bootstrap` does."""
    if all(plan.moe_a2a_backend == "reference" for plan in plans):
        return None
    spec = ep_spec(model.config, plans, max_tokens=max_tokens, dtype=model.dtype)
    spec = dataclasses.replace(spec, link=link)
    return runtime.bootstrap(model.mesh, spec, members or runtime.ALONE)


def abstract_model(
    config: ModelConfig,
    num_slots: int,
    dtype: DTypeLike,
    quantization: Quantization | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and its parameters as ShapeDtypeStructs, without allocating any.

    Raises ValueError for a configuration that cannot run with this quantisation.
    """
    check_quantization(quantization, config)
    model = nnx.eval_shape(
        lambda: DeepseekForCausalLM(
            config, num_slots=num_slots, dtype=dtype, quantization=quantization
        )
    )
    return nnx.split(model)


def parameter_specs(params: nnx.State) -> Any:
    """A PartitionSpec for each parameter, in the structure of `params`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: sharding.parameter_spec(path_names(path)), params
    )


def path_names(path: tuple[Any, ...]) -> tuple[str | int, ...]:
    """The keys of a pytree path of `params`: ("model", "layers", 0, "mlp", ...)."""
    names = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path)
    return tuple(name for name in names if name not in ("value", None))


class Steps:
    """The programs of one model under one plan for each phase."""

    def __init__(self, model: ShardedModel, *, prefill: ExecutionPlan, decode: ExecutionPlan):
        for plan in (prefill, decode):
            ep_size = model.ranks.ep_size
            if (plan.ep_size, plan.slots_per_rank) != (ep_size, model.slots_per_rank):
                raise ValueError(
                    f"the plan is for {plan.ep_size} ranks of {plan.slots_per_rank} slots, the "
                    f"model is on {ep_size} ranks of {model.slots_per_rank}"
                )
            if ep_size != model.mesh.size and plan.moe_a2a_backend == "reference":
                raise ValueError(
                    f"moe_a2a_backend 'reference' exchanges tokens within one process, the model "
                    f"has {model.mesh.size} of {ep_size} ranks in this one"
                )
        self.model = model
        self.plans = (prefill, decode)
        params, mesh, ranked = parameter_specs(model.params), model.mesh, sharding.PER_RANK
        graphdef = model.graphdef

        def on_ranks(function, in_specs, **jit_options):
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=ranked, check_vma=False
            )
            placed = jax.tree.map(
                lambda spec: jax.NamedSharding(mesh, spec),
                in_specs,
                is_leaf=lambda x: isinstance(x, P),
            )
            return jax.jit(mapped, in_shardings=placed, **jit_options)

        def make_forward(forward, plan):
            return on_ranks(
                partial(forward, graphdef, plan), (params, ranked, ranked, P()), donate_argnums=1
            )

        self._forward = {
            (forward, plan): make_forward(forward, plan)
            for plan in {*self.plans, *(plan.unsplit for plan in self.plans)}
            for forward in (_forward, _forward_with_load, _forward_with_activations)
        }
        self._sample = on_ranks(partial(_sample, graphdef), (params,) + 3 * (ranked,))
        self._sample_biased = on_ranks(partial(_sample, graphdef), (params,) + 4 * (ranked,))
        self._score = on_ranks(partial(_score, graphdef), (params,) + 2 * (ranked,))
        self._logits = on_ranks(partial(_logits, graphdef), (params, ranked))
        self._read_pages = on_ranks(_read_pages, (ranked, ranked))
        self._write_pages = on_ranks(_write_pages, 3 * (ranked,), donate_argnums=0)

    def forward(
        self, cache: KVCache, batch: Batch, *, is_split: bool = True
    ) -> tuple[Float[Array, "D T H"], KVCache]:
        """One step of the decoder: normalised last hidden states. `cache` is donated.

        Cut in two where the plan is, unless not `is_split`.
        """
        run = self._forward[_forward, self._plan(batch, is_split)]
        return run(self.model.params, cache, batch, self.model.placement)

    def forward_with_load(
        self,
        cache: KVCache,
        load: Int32[Array, "D L P"],
        batch: Batch,
        *,
        is_split: bool = True,
    ) -> tuple[Float[Array, "D T H"], KVCache, Int32[Array, "D L P"], tuple[Array, ...]]:
        """As `forward`, with its choices of physical experts added to `load`, which is donated, and
        each MoE layer's logical experts of each token, [D, T, K]."""
        run = self._forward[_forward_with_load, self._plan(batch, is_split)]
        hidden, (cache, load), topk_idx = run(
            self.model.params, (cache, load), batch, self.model.placement
        )
        return hidden, cache, load, topk_idx

    def trace_forward(
        self,
        cache: KVCache,
        batch: Batch,
        load: Int32[Array, "D L P"] | None = None,
        *,
        is_split: bool = True,
    ) -> Traced:
        """Trace `forward`, or `forward_with_load`, without running it: it then asks for the kernels
        that it will launch."""
        plan = self._plan(batch, is_split)
        arguments = batch, self.model.placement
        if load is None:
            return self._forward[_forward, plan].trace(self.model.params, cache, *arguments)
        run = self._forward[_forward_with_load, plan]
        return run.trace(self.model.params, (cache, load), *arguments)

    def forward_with_activations(
        self, cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "D T H"], KVCache, Activations]:
        """As `forward`, with every layer's output and routing."""
        run = self._forward[_forward_with_activations, self._plan(batch)]
        return run(self.model.params, cache, batch, self.model.placement)

    def sample(
        self,
        hidden: Float[Array, "D T H"],
        rows: Int32[Any, "D B"],
        sampling: SamplingBatch,
        bias: Float32[Any, "D B V"] | None = None,
    ) -> Sampled:
        """A token from each of the hidden states `rows` of each rank."""
        if bias is None:
            return self._sample(self.model.params, hidden, rows, sampling)
        return self._sample_biased(self.model.params, hidden, rows, sampling, bias)

    def score(
        self, hidden: Float[Array, "D T H"], targets: Int32[Any, "D T"]
    ) -> tuple[Float32[Array, "D T"], Int32[Array, "D T k"], Float32[Array, "D T k"]]:
        """Log-probability of each target after its hidden state; the most likely tokens, theirs."""
        return self._score(self.model.params, hidden, targets)

    def logits(self, hidden: Float[Array, "D T H"]) -> Float32[Array, "D T V"]:
        """Of every hidden state, for comparisons."""
        return self._logits(self.model.params, hidden)

    def read_pages(
        self, cache: KVCache, page_ids: Int32[Any, "D n"]
    ) -> Float[Array, "D n L page_size latent"]:
        """Copies of pages of each rank, a page's layers together."""
        return self._read_pages(cache, page_ids)

    def write_pages(
        self,
        cache: KVCache,
        page_ids: Int32[Any, "D n"],
        pages: Float[Array, "D n L page_size latent"],
    ) -> KVCache:
        """The cache, which is donated, with pages of each rank replaced."""
        return self._write_pages(cache, page_ids, pages)

    def _plan(self, batch: Batch, is_split: bool = True) -> ExecutionPlan:
        plan = self.plans[0] if isinstance(batch, PrefillBatch) else self.plans[1]
        return plan if is_split else plan.unsplit


def _forward(graphdef, plan, params, cache, batch, placement):
    hidden, cache, _ = _decode(graphdef, plan, params, cache, batch, placement)
    return _ranked((hidden, cache))


def _forward_with_load(graphdef, plan, params, state, batch, placement):
    cache, load = state
    hidden, cache, chosen = _decode(graphdef, plan, params, cache, batch, placement)
    with jax.named_scope("load"):
        load = add_load(load[0], chosen.physical_idx)
    return _ranked((hidden, (cache, load), chosen.topk_idx))


def _forward_with_activations(graphdef, plan, params, cache, batch, placement):
    return _ranked(_decode(graphdef, plan, params, cache, batch, placement))


def _decode(graphdef, plan, params, cache, batch, placement):
    model = nnx.merge(graphdef, params)
    cache = jax.tree.map(lambda x: x[0], cache)
    return model.model(of_rank(batch), cache, placement, plan)


def _ranked(out):
    return jax.tree.map(lambda x: x[None], out)


def _sample(graphdef, params, hidden, rows, sampling_batch, bias=None):
    model = nnx.merge(graphdef, params)
    logits = model.logits(hidden[0][rows[0]])
    local = jax.tree.map(lambda x: x[0], sampling_batch)
    sampled = sampling.sample(logits, local, None if bias is None else bias[0])
    return _ranked(sampled)


def _score(graphdef, params, hidden, targets):
    model = nnx.merge(graphdef, params)

    def score_row(row):
        state, target = row
        logits = model.logits(state[None])
        scored = sampling.score(logits, target[None], with_top=jnp.asarray(True))
        return jax.tree.map(lambda x: x[0], scored)

    scored = jax.lax.map(score_row, (hidden[0], jnp.maximum(targets[0], 0)), batch_size=SCORE_ROWS)
    return _ranked(scored)


def _read_pages(cache, page_ids):
    cache = jax.tree.map(lambda x: x[0], cache)
    return _ranked(kv_cache.read_pages(cache, page_ids[0]))


def _write_pages(cache, page_ids, pages):
    cache = jax.tree.map(lambda x: x[0], cache)
    return _ranked(kv_cache.write_pages(cache, page_ids[0], pages[0]))


def _logits(graphdef, params, hidden):
    return nnx.merge(graphdef, params).logits(hidden[0])[None]
