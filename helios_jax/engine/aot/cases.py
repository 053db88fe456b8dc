"""Which steps are compiled, and what must be in them? Shapes of a model the size of Llama 3 8B."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from helios_jax.cache.paged import KVScales
from helios_jax.config import ModelConfig, RopeConfig, require
from helios_jax.engine.aot.hlo import Array
from helios_jax.engine.aot.judge import Expected
from helios_jax.engine.config import EngineConfig, resolve_config
from helios_jax.engine.state import EngineState, init_arrivals, init_sampling, init_state
from helios_jax.engine.step import engine_step
from helios_jax.engine.work import Variant
from helios_jax.model import init_params
from helios_jax.model.forms import ServingForm, serving_form
from helios_jax.quant import QuantTensor, Scheme, rtn
from helios_jax.sampling import SamplingShapes
from helios_jax.speculative import DraftModel, PromptLookup, Speculation, SpeculationParams
from pallas_kernels.devices import DEVICES
from pallas_kernels.int4_matmul.config import max_kernel_rows

POOL_BYTES = 20 << 30
PRECISIONS = ("narrow", "both")
# Who drafts, if anybody: see `_speculation`.
DRAFTERS = ("none", "lookup", "model")
_DRAFT_TOKENS = 4
# Of 64 rows as many tokens as the chunk has.
_CATCH_UP_TOKENS = 8
_MAX_MODEL_LEN = 8192
_SCHEME = Scheme(bits=4, group_size=64, grid="symmetric")
_SHAPES = SamplingShapes(num_stop_ids=4)
_NUM_ARRIVALS, _PROMPT_TOKENS, _NUM_ABORTS = 8, 512, 8
# XLA's names of the dtypes that a state has.
_DTYPES = {"uint16": "u16", "uint32": "u32", "int32": "s32", "float32": "f32", "bool": "pred"}


@dataclass(frozen=True)
class StepCase:
    """One compilation of `engine_step`.

    Attributes:
      device: a key of `pallas_kernels.devices.DEVICES`.
      num_layers: of the model; 32 for the whole one.
      num_rows: that decode, and that take part in the chunk.
      chunk_tokens: of the prefill chunk.
      precisions: "narrow" for FP8 rows up to the watermark only, "both" for bfloat16 rows too.
      drafter: "none"; "lookup", prompt lookup; "model", a smaller model with INT4 linears. Either
        drafts up to 4 tokens a round.
    """

    device: str
    num_layers: int = 2
    num_rows: int = 64
    chunk_tokens: int = 512
    precisions: str = "narrow"
    drafter: str = "none"

    def __post_init__(self):
        require(
            self.device in DEVICES, f"device={self.device!r}: must be one of {', '.join(DEVICES)}"
        )
        require(
            self.precisions in PRECISIONS,
            f"precisions={self.precisions!r}: must be one of {', '.join(PRECISIONS)}",
        )
        require(
            self.drafter in DRAFTERS,
            f"drafter={self.drafter!r}: must be one of {', '.join(DRAFTERS)}",
        )
        most = max_kernel_rows(DEVICES[self.device])
        for name in ("num_layers", "num_rows", "chunk_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: must be at least 1")
        a_row = {"none": 1, "lookup": 1 + _DRAFT_TOKENS, "model": _CATCH_UP_TOKENS}[self.drafter]
        for name, tokens in (("num_rows", a_row), ("chunk_tokens", 1)):
            value = getattr(self, name)
            require(
                value * tokens <= most,
                f"{name}={value}: above {most} tokens {self.device} multiplies the expanded "
                "weights by choice, so there would be nothing to check; give fewer",
            )

    @property
    def label(self) -> str:
        return (
            f"{self.num_layers} layers, {self.num_rows} rows, chunk of {self.chunk_tokens}, "
            f"{'FP8 KV' if self.precisions == 'narrow' else 'FP8 and bfloat16 KV'}"
            f"{'' if self.drafter == 'none' else f', drafts by {self.drafter}'}"
        )


class Step(NamedTuple):
    """function(*arguments), `arguments[1]` to be donated; all arguments are structs."""

    function: Callable
    arguments: tuple[Any, ...]
    expected: Expected


def model_config(num_layers: int) -> ModelConfig:
    """Llama 3 8B with so many of its 32 layers."""
    return ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=_MAX_MODEL_LEN,
        rope=RopeConfig(theta=500_000.0),
    )


def abstract_step(case: StepCase) -> Step:
    """The step of `case` without any value, and what must be in the compiled one."""
    config = model_config(case.num_layers)
    form = _abstract_form(config)
    engine = EngineConfig(
        max_num_seqs=case.num_rows,
        max_num_batched_tokens=max(case.chunk_tokens, case.num_rows),
        kv_cache_dtype="fp8_e4m3",
        kv_cache_memory_bytes=POOL_BYTES,
    )
    speculation, extra = _speculation(case.drafter)
    scheduler, step = resolve_config(
        engine, config, cache_dtype=form.cache_dtype, speculation=speculation
    )

    def start() -> EngineState:
        ones = jnp.ones((config.num_layers, config.num_kv_heads), jnp.float32)
        scales = KVScales(ones, ones)
        return init_state(config, scheduler, step, shapes=_SHAPES, scales=scales)

    state = jax.eval_shape(start)
    arrivals = jax.eval_shape(partial(_arrivals, config), state)
    has_wide = case.precisions == "both"
    context = scheduler.max_model_len if has_wide else math.ceil(scheduler.kv_watermark)
    rounds = Variant(case.num_rows, context, has_wide=has_wide)
    chunk = Variant(case.num_rows, context, chunk_tokens=case.chunk_tokens, has_wide=has_wide)
    function = partial(engine_step, model=form.model, config=step, chunk=chunk, rounds=rounds)
    now, max_rounds = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))
    kv_dtypes = [step.narrow_dtype, *([step.wide_dtype] if has_wide else [])]
    return Step(
        function,
        (form.params, state, arrivals, now, max_rounds, extra),
        _expected(form, state, kv_dtypes, config.num_layers, case.num_rows, speculation, extra),
    )


def _speculation(drafter: str) -> tuple[Speculation | None, SpeculationParams]:
    """Who drafts; a model's parameters are structs."""
    if drafter == "none":
        return None, SpeculationParams()
    if drafter == "lookup":
        return Speculation(PromptLookup(), _DRAFT_TOKENS), SpeculationParams()
    form = _abstract_form(draft_config())
    proposer = DraftModel(form.model, catch_up_tokens=_CATCH_UP_TOKENS)
    return Speculation(proposer, _DRAFT_TOKENS), SpeculationParams(form.params)


def draft_config() -> ModelConfig:
    """A draft of two layers for `model_config`."""
    return dataclasses.replace(
        model_config(2), hidden_size=2048, intermediate_size=5632, num_heads=16, num_kv_heads=8
    )


def _abstract_form(config: ModelConfig) -> ServingForm:
    """What serves a checkpoint with INT4 linears; by default the head stays as it is."""
    forms: list[ServingForm] = []

    def quantised(path, leaf):
        is_linear = path[-1].key == "kernel" and path[-2].key != "lm_head"
        return rtn(leaf.T, _SCHEME) if is_linear else leaf

    def serve():
        params = init_params(config, jax.random.key(0), jnp.bfloat16)
        params = jax.tree_util.tree_map_with_path(quantised, params)
        forms.append(serving_form(config, params, "int4", "gpu"))
        return forms[-1].params

    # Only arrays come out of eval_shape.
    params = jax.eval_shape(serve)
    return forms[-1]._replace(params=params)


def _arrivals(config: ModelConfig, state: EngineState):
    sampling = init_sampling(config, _NUM_ARRIVALS, _SHAPES)
    arrivals = init_arrivals(state, _NUM_ARRIVALS, _PROMPT_TOKENS, _NUM_ABORTS, sampling)
    return jax.tree.map(jnp.asarray, arrivals)


def _expected(
    form: ServingForm,
    state: EngineState,
    kv_dtypes: list[str],
    num_layers: int,
    num_rows: int,
    speculation: Speculation | None,
    extra: SpeculationParams,
) -> Expected:
    linears, weights = _linears(form.params)
    one_pass = _kernels(weights, kv_dtypes, num_layers)
    a_round, pools = Counter(one_pass), [state.pools.k, state.pools.v]
    if speculation is not None:
        # A round has a pass for each length of draft, of which it takes one.
        a_round = _times(one_pass, len(speculation.pass_lengths))
        num_rows *= 1 + speculation.max_num_draft_tokens
    if speculation is not None and isinstance(speculation.proposer, DraftModel):
        assert state.speculation is not None, "the engine speculates"
        drafts, drafts_quantised = _linears(extra.proposer)
        its_layers = speculation.proposer.model.config.num_layers
        its_pass = _kernels(drafts_quantised, kv_dtypes, its_layers)
        # It catches up, begins a draft, and goes on with it.
        a_round += _times(its_pass, 3)
        # Catching up is for keys and values: of the last layer nothing but their linear is used.
        a_round["int4_matmul"] -= len(drafts_quantised) // its_layers - 1
        a_round.subtract(f"paged_attention_{kv_dtype}" for kv_dtype in kv_dtypes)
        pools += jax.tree.leaves(state.speculation.proposer.shared.pools)
        linears, codes = [*linears, *drafts], [*weights, *drafts_quantised]
    else:
        codes = weights
    return Expected(
        passes=(dict(one_pass), dict(a_round)),
        codes=frozenset(weight.packed.shape for weight in codes),
        dense=frozenset(linear.shape for linear in linears if not _is_quant(linear)),
        weight_size=min(weight.in_features * weight.out_features for weight in weights),
        growing=frozenset(
            Array(_DTYPES[array.dtype.name], array.shape)
            for array in [*pools, *jax.tree.leaves(state.scheduler.pool)]
            if array.shape
        ),
        pool_bytes=sum(pool.size * pool.dtype.itemsize for pool in pools),
        logits=(num_rows, form.model.config.vocab_size),
    )


def _is_quant(leaf) -> bool:
    return isinstance(leaf, QuantTensor)


def _linears(params) -> tuple[list, list[QuantTensor]]:
    """All linears' weights, and those that are quantised."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_quant)
    linears = [leaf for path, leaf in leaves if path[-1].key == "kernel"]
    return linears, [linear for linear in linears if _is_quant(linear)]


def _kernels(weights: list[QuantTensor], kv_dtypes: list[str], num_layers: int) -> Counter[str]:
    """What one pass over a model launches."""
    kernels = Counter(int4_matmul=len(weights))
    for kv_dtype in kv_dtypes:
        kernels[f"append_kv_{kv_dtype}"] = num_layers
        kernels[f"paged_attention_{kv_dtype}"] = num_layers
    return kernels


def _times(kernels: Counter[str], times: int) -> Counter[str]:
    return Counter({name: times * count for name, count in kernels.items()})
