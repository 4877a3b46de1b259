"""What a checkpoint is: `ModelConfig`, read from a Hugging Face `config.json`.

Field names are Hugging Face's. How a model is run is `jaxmoe.plan.ExecutionPlan`, never here.

Letters of the shapes, everywhere in this project:

    T tokens of one rank      E logical experts       H hidden_size         L layers
    K experts per token       P physical experts      F expert width        N attention heads
    M rows                    e experts of one rank   C rows of a group     R replicas of an expert
    B requests of one rank    W pages a batch reads   D ranks               V vocabulary
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal


class UnsupportedConfigError(ValueError):
    """The checkpoint asks for something this project does not implement; the message names it."""


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension (arXiv:2309.00071), as DeepSeek's checkpoints configure it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @property
    def embedding_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_scale(self) -> float:
        """What the attention scale is multiplied by."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek V2 or V3 architecture. Make one with `from_hf` or `load`."""

    model_type: Literal["deepseek_v2", "deepseek_v3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: YarnScaling | None
    attention_bias: bool
    tie_word_embeddings: bool
    torch_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weight_block_size: tuple[int, int] | None
    """[rows, columns] that share one `weight_scale_inv` of an FP8 checkpoint; None for others."""

    @property
    def num_moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.first_k_dense_replace)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Numbers cached per token and layer: the compressed key-value and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        scale = self.qk_head_dim**-0.5
        return scale * self.rope_scaling.softmax_scale if self.rope_scaling else scale

    @classmethod
    def load(cls, model_dir: Path | str) -> "ModelConfig":
        """Read `model_dir/config.json`.

        Raises FileNotFoundError or ValueError with the path, UnsupportedConfigError with the field.
        """
        path = Path(model_dir) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"no config.json in {Path(model_dir)}: a model path is a Hugging Face directory or "
                "one made by `jaxmoe convert`"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"{path} must hold a JSON object, not {type(raw).__name__}")
        return cls.from_hf(raw)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Check a Hugging Face configuration and keep what the model needs of it.

        Fields this project has never heard of are ignored when they are absent from the published
        DeepSeek V2 and V3 configurations' semantics (tokens, initialisation, dropout of training);
        a field that would change the result is refused by name.
        """
        model_type = raw.get("model_type")
        if model_type not in ("deepseek_v2", "deepseek_v3"):
            raise UnsupportedConfigError(
                f"model_type must be 'deepseek_v2' or 'deepseek_v3', got {model_type!r}"
            )
        is_v3 = model_type == "deepseek_v3"

        def positive(name: str, default: int | None = None) -> int:
            value = raw.get(name, default)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
            return value

        heads = positive("num_attention_heads")
        experts = positive("n_routed_experts")
        _refuse(raw, "hidden_act", ("silu",))
        _refuse(raw, "moe_layer_freq", (1,))
        _refuse(raw, "rope_interleave", (True,))
        _refuse(raw, "mlp_bias", (False,))
        _refuse(raw, "attention_dropout", (0, 0.0))
        _refuse(raw, "ep_size", (1,))
        _refuse(raw, "num_key_value_heads", (heads, None))
        if is_v3:
            _refuse(raw, "scoring_func", ("sigmoid",))
            _refuse(raw, "topk_method", ("noaux_tc",))
            is_grouped = True
        else:
            _refuse(raw, "scoring_func", ("softmax",))
            _refuse(raw, "topk_method", ("greedy", "group_limited_greedy"))
            # The published code and transformers disagree on what a normalised V2 router does,
            # and no published V2 checkpoint asks for it.
            _refuse(raw, "norm_topk_prob", (False,))
            is_grouped = raw.get("topk_method", "greedy") == "group_limited_greedy"

        config = cls(
            model_type=model_type,
            vocab_size=positive("vocab_size"),
            hidden_size=positive("hidden_size"),
            intermediate_size=positive("intermediate_size"),
            moe_intermediate_size=positive("moe_intermediate_size"),
            num_hidden_layers=positive("num_hidden_layers"),
            num_attention_heads=heads,
            n_routed_experts=experts,
            n_shared_experts=positive("n_shared_experts", 1),
            num_experts_per_tok=positive("num_experts_per_tok"),
            first_k_dense_replace=int(raw.get("first_k_dense_replace", 3 if is_v3 else 0)),
            n_group=positive("n_group") if is_grouped else 1,
            topk_group=positive("topk_group") if is_grouped else 1,
            norm_topk_prob=bool(raw.get("norm_topk_prob", True)) if is_v3 else False,
            routed_scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
            q_lora_rank=None if raw.get("q_lora_rank") is None else positive("q_lora_rank"),
            kv_lora_rank=positive("kv_lora_rank"),
            qk_nope_head_dim=positive("qk_nope_head_dim"),
            qk_rope_head_dim=positive("qk_rope_head_dim"),
            v_head_dim=positive("v_head_dim"),
            max_position_embeddings=positive("max_position_embeddings"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            rope_scaling=_rope_scaling(raw),
            attention_bias=bool(raw.get("attention_bias", False)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            torch_dtype=str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16"),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            weight_block_size=_weight_block_size(raw.get("quantization_config")),
        )
        config._check()
        return config

    def _check(self) -> None:
        experts, groups, top_k = self.n_routed_experts, self.n_group, self.num_experts_per_tok
        if experts % groups:
            raise ValueError(
                f"n_routed_experts ({experts}) must be divisible by n_group ({groups})"
            )
        if self.topk_group > groups:
            raise ValueError(f"topk_group ({self.topk_group}) must not exceed n_group ({groups})")
        if top_k > experts // groups * self.topk_group:
            raise ValueError(
                f"num_experts_per_tok ({top_k}) must not exceed the experts of topk_group groups "
                f"({experts // groups * self.topk_group})"
            )
        if self.model_type == "deepseek_v3" and experts // groups < 2:
            raise ValueError(
                "the V3 router adds the two best experts of a group: n_routed_experts "
                f"({experts}) must be at least twice n_group ({groups})"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        if not 0 <= self.first_k_dense_replace:
            raise ValueError(
                f"first_k_dense_replace must not be negative, got {self.first_k_dense_replace}"
            )


def _refuse(raw: Mapping[str, Any], name: str, supported: tuple[Any, ...]) -> None:
    """Raise when `raw[name]` is present and not one of the supported values."""
    if name in raw and raw[name] not in supported and raw[name] is not None:
        wanted = " or ".join(repr(value) for value in supported)
        raise UnsupportedConfigError(f"{name}={raw[name]!r} is not supported, only {wanted}")


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers >= 5 writes `rope_parameters`, with the base inside; earlier `rope_scaling`.
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters must be an object, got {parameters!r}")
    return parameters


def _rope_theta(raw: Mapping[str, Any]) -> float:
    return float(_rope_parameters(raw).get("rope_theta", raw.get("rope_theta", 10000.0)))


def _rope_scaling(raw: Mapping[str, Any]) -> YarnScaling | None:
    parameters = _rope_parameters(raw)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise UnsupportedConfigError(
            f"rope_type={kind!r} is not supported, only 'default' or 'yarn'"
        )
    for name, supported in (("truncate", (True,)), ("attention_factor", (None,))):
        _refuse(parameters, name, supported)
    original = parameters.get("original_max_position_embeddings")
    if not isinstance(original, int) or original < 1:
        raise ValueError(
            f"yarn needs original_max_position_embeddings, a positive integer, got {original!r}"
        )
    factor = parameters.get("factor")
    if factor is None:
        factor = raw["max_position_embeddings"] / original
    return YarnScaling(
        factor=float(factor),
        original_max_position_embeddings=original,
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        mscale=float(parameters.get("mscale") or 0),
        mscale_all_dim=float(parameters.get("mscale_all_dim") or 0),
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"eos_token_id must be an integer or a list of them, got {value!r}")
    return ids


def _weight_block_size(quantization: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method != "fp8" or quantization.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedConfigError(
            f"quantization_config with quant_method={method!r}, fmt={quantization.get('fmt')!r} is "
            "not supported, only quant_method='fp8' with fmt='e4m3'"
        )
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(b > 0 for b in block)):
        raise UnsupportedConfigError(
            f"weight_block_size={block!r} is not supported: fp8 weights need [rows, columns]"
        )
    return int(block[0]), int(block[1])
