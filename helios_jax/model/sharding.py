"""How are parameters laid out over a mesh? One table of logical axes, one of mesh axes."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from helios_jax.config import ModelConfig
from helios_jax.model.params import init_params

# The axes of every parameter, by the last two names of its path.
LOGICAL_AXES = {
    "embed/embedding": ("vocab", "embed"),
    "q/kernel": ("embed", "heads"),
    "k/kernel": ("embed", "kv_heads"),
    "v/kernel": ("embed", "kv_heads"),
    "o/kernel": ("heads", "embed"),
    "q/bias": ("heads",),
    "k/bias": ("kv_heads",),
    "v/bias": ("kv_heads",),
    "o/bias": ("embed",),
    "q_norm/scale": ("head_dim",),
    "k_norm/scale": ("head_dim",),
    "gate/kernel": ("embed", "ffn"),
    "up/kernel": ("embed", "ffn"),
    "down/kernel": ("ffn", "embed"),
    "gate/bias": ("ffn",),
    "up/bias": ("ffn",),
    "down/bias": ("embed",),
    "attention_norm/scale": ("embed",),
    "ffn_norm/scale": ("embed",),
    "token_norm/scale": ("embed",),
    "final_norm/scale": ("embed",),
    "lm_head/kernel": ("embed", "vocab"),
}

# Tensor parallelism over a mesh axis "model": column- then row-parallel linears.
# "embed" stays whole; map it to "data" for FSDP.
TENSOR_PARALLEL = {"heads": "model", "kv_heads": "model", "ffn": "model", "vocab": "model"}


def logical_axes(config: ModelConfig) -> Any:
    """The params tree of `config` with each leaf replaced by its tuple of logical axis names."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(lambda path, _: _axes(path), shapes)


def param_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, rules: dict[str, str] | None = None
) -> Any:
    """NamedShardings for the (unfused, dense) params tree of `config`.

    Args:
      mesh: any mesh; a rule that names an axis the mesh lacks means replication.
      rules: logical axis -> mesh axis; default `TENSOR_PARALLEL`.

    Raises:
      ValueError: a mesh axis does not divide what it would split, or would split one parameter
        along two of its axes.
    """
    rules = TENSOR_PARALLEL if rules is None else rules
    counts = {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "head_dim": config.head_dim,
    }
    unknown = set(rules) - set(counts)
    if unknown:
        raise ValueError(f"rules name unknown axes {sorted(unknown)}: known are {sorted(counts)}")
    for axis, mesh_axis in rules.items():
        parts = mesh.shape.get(mesh_axis, 1)
        if counts[axis] % parts:
            raise ValueError(
                f"mesh axis {mesh_axis!r} has {parts} devices: it must divide "
                f"{axis}={counts[axis]}; use fewer, or pass rules without {axis!r}"
            )

    def sharding(path, _):
        names = [rules.get(axis) for axis in _axes(path)]
        names = [name if name in mesh.shape else None for name in names]
        if names[0] is not None and names[0] in names[1:]:
            first, second = _axes(path)
            raise ValueError(
                f"rules map {first!r} and {second!r} of {_name(path)} to the mesh axis "
                f"{names[0]!r}: an axis can split a parameter once; leave one of them out"
            )
        return NamedSharding(mesh, PartitionSpec(*names))

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(sharding, shapes)


def _name(path) -> str:
    return "/".join(key.key for key in path[1:])


def _axes(path) -> tuple[str, ...]:
    return LOGICAL_AXES["/".join(key.key for key in path[-2:])]
