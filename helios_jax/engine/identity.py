"""Which model and settings do a saved engine and a recording belong to?

An identity is a JSON-ready dict. Sums of parameters are taken where they lie, so that those of a
large model stay on its device. Measured for SmolLM2 in its int8 form (0.43 GB) on one core: 0.6 s,
and 2.4 s the first time, compiling included.
"""

import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from helios_jax.cache.paged import KVScales
from helios_jax.config import ModelConfig
from helios_jax.engine.config import EngineConfig, StepConfig
from helios_jax.sampling import SamplingShapes
from helios_jax.scheduler import SchedulerConfig
from helios_jax.speculative import CostTable, SpeculationParams
from helios_jax.tokenizer import Tokenizer

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_FLAX_FIELDS = ("parent", "name")
_REMEDIES = {
    "model_config": "use the model that it was made with",
    "weights": "load the model in the same form (dtype)",
    "parameters": "use the very checkpoint that it was made with",
    "tokenizer": "use the tokenizer that it was made with",
    "scheduler_config": "load the model in the same form (dtype), on the same kind of device",
    "step_config": "load the model in the same form (dtype), on the same kind of device",
    "speculation": "give the same `speculation`, and the same draft model's parameters",
    "urgency": "give the same policy as `urgency`",
}


def identity(
    form: Any,
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    scheduler_config: SchedulerConfig,
    step_config: StepConfig,
    proposer_params: Any = None,
) -> dict[str, Any]:
    """What must be equal for a state to mean the same.

    Args:
      form: a `ServingForm`.
      proposer_params: what `step_config.speculation`'s proposer computes with.
    """
    speculation = step_config.speculation
    step = plain(dataclasses.replace(step_config, speculation=None))
    del step["speculation"]
    return {
        "model_config": model_config.to_dict(),
        "weights": {
            "dtype": form.dtype,
            "cache_dtype": jnp.dtype(form.cache_dtype).name,
            "served_config": form.model.config.to_dict(),
        },
        "parameters": parameters_sum(form.params),
        "tokenizer": tokenizer.fingerprint(),
        "speculation": None
        if speculation is None
        else {"static": described(speculation), "parameters": parameters_sum(proposer_params)},
        "scheduler_config": plain(scheduler_config),
        "step_config": step,
    }


def check_identity(where: str, found: Any, expected: dict[str, Any]) -> None:
    """ValueError for the first field in which the file at `where` is of something else."""
    found = found if isinstance(found, dict) else {}
    for section, value in expected.items():
        remedy = _REMEDIES[section]
        # As JSON has it: tuples are lists there.
        for field, old, new in _differences(
            section, found.get(section), json.loads(json.dumps(value, default=np.generic.item))
        ):
            raise ValueError(f"{where}: {field}={old!r}, but {new!r} here; {remedy}")


def _differences(name: str, old: Any, new: Any):
    """(field, old, new) for leaves that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            yield from _differences(f"{name}.{key}", old.get(key), new.get(key))
    elif old != new:
        yield name, old, new


def parameters_sum(params: Any) -> str:
    """sha256 over the parameters' names, dtypes, shapes and sums, in hexadecimal.

    A sum adds up, modulo 2^32, one hash of each element and its place, so that no single element
    can change unnoticed. It is a check against mistakes, not against forgery.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sums = jax.device_get([_sums(jnp.asarray(leaf)) for _, leaf in leaves])
    digest = hashlib.sha256()
    for (path, leaf), words in zip(leaves, sums, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        digest.update(f"{name} {leaf.dtype} {leaf.shape} {words.tolist()}\n".encode())
    return digest.hexdigest()


@jax.jit
def _sums(array: Array) -> Array:
    """uint32 [2]: sums of murmur3's 32-bit finalizer, which is a bijection, of each element."""
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    place = lax.iota(jnp.uint32, bits.size).reshape(bits.shape)

    def mixed(multiplier: int) -> Array:
        x = bits ^ (place * jnp.uint32(multiplier))
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)

    return jnp.stack([mixed(0x9E3779B1), mixed(0x27D4EB2F)])


def plain(config: Any) -> dict[str, Any]:
    """A frozen configuration as JSON has it; infinity becomes the string "inf"."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(config).items()
    }


def described(value: Any) -> Any:
    """A static value as JSON has it, by content: types by their names, functions by theirs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Where a Flax module hangs is no part of what it computes.
        names = (field.name for field in dataclasses.fields(value))
        fields = {
            name: described(getattr(value, name)) for name in names if name not in _FLAX_FIELDS
        }
        return {"type": policy_name(type(value)), **fields}
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return policy_name(value) if callable(value) else repr(value)


class Settings(NamedTuple):
    """How an engine was set up, beside its model.

    config: with the KV pool as large as it was, whatever is free now.
    kv_scales: as `Engine` takes them.
    shapes: of the state's sampling parameters.
    costs: leaves of `SpeculationParams.costs`, which may have been measured.
    """

    config: EngineConfig
    kv_scales: KVScales | None
    shapes: SamplingShapes
    costs: Sequence[Any] = ()


def settings_to_json(settings: Settings, pool_bytes: int) -> dict[str, Any]:
    """JSON-ready and exact.

    Args:
      pool_bytes: what the KV pool became.
    """
    scales = settings.kv_scales
    return {
        "config": plain(settings.config) | {"kv_cache_memory_bytes": pool_bytes},
        "kv_scales": None
        if scales is None
        else {name: np.asarray(array).tolist() for name, array in scales._asdict().items()},
        "sampling_shapes": dataclasses.asdict(settings.shapes),
        "speculation_costs": [
            {"dtype": np.asarray(leaf).dtype.name, "values": np.asarray(leaf).tolist()}
            for leaf in settings.costs
        ],
    }


def settings_from_json(where: str, fields: dict[str, Any]) -> Settings:
    """The inverse.

    Raises:
      ValueError: naming the file at `where` and what is no setting in it.
    """
    try:
        config = dict(fields["config"])
        config["kv_watermark"] = float(config["kv_watermark"])
        scales = fields["kv_scales"]
        if scales is not None:
            scales = KVScales(**{name: jnp.asarray(x, jnp.float32) for name, x in scales.items()})
        shapes = SamplingShapes(**fields["sampling_shapes"])
        costs = [jnp.asarray(c["values"], c["dtype"]) for c in fields["speculation_costs"]]
        return Settings(EngineConfig(**config), scales, shapes, costs)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: settings are not of this version: {error!r}") from None


def with_saved_costs(settings: Settings, extra: SpeculationParams) -> SpeculationParams:
    """`extra` with the costs that a saved or recorded engine had, measured ones too."""
    given = extra.costs
    if given is None:
        # Those that an engine measures; without any, nothing needs them.
        given = CostTable(*settings.costs) if len(settings.costs) == 2 else None
    structure = jax.tree.structure(given)
    if not settings.costs or structure.num_leaves != len(settings.costs):
        return extra
    return extra._replace(costs=jax.tree.unflatten(structure, settings.costs))


def policy_name(urgency: Callable) -> str:
    """module:name of a policy, as the command line takes it."""
    name = getattr(urgency, "__qualname__", type(urgency).__qualname__)
    return f"{urgency.__module__}:{name}"


def versions() -> dict[str, str]:
    """What computes here: bits may differ elsewhere."""
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }
