"""Rotary position embedding: frequencies for every scaling type, and the rotation."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """The H/2 angular speeds, radians per position, and the factor on cos and sin.

    "dynamic" scales for the longest sequence it allows, `factor * original_max_position`, from the
    first token on (as vLLM does): keys in the cache then never disagree about the base, and chunked
    prefill equals one-shot prefill. Transformers instead changes the base as a sequence grows.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    theta = rope.theta
    if rope.rope_type == "dynamic":
        theta *= (rope.factor**2 - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    inverse = theta**-exponents
    match rope.rope_type:
        case "linear":
            return inverse / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, inverse), 1.0
        case "yarn":
            return _yarn(rope, inverse, head_dim), _yarn_attention_factor(rope)
    return inverse, 1.0


def cos_sin(rope: RopeConfig, head_dim: int, positions_BT: jax.Array):
    """float32 cos_BTH and sin_BTH (both halves of H filled) for integer positions."""
    inverse, factor = inverse_frequencies(rope, head_dim)
    angles = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)
    angles_BTH = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles_BTH) * factor, jnp.sin(angles_BTH) * factor


def rotate(heads_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """Rotates dimension pairs (d, d + H/2) in float32; keeps the dtype (arXiv 2104.09864)."""
    heads = heads_BTNH.astype(jnp.float32)
    first, second = jnp.split(heads, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    rotated = heads * cos_BTH[:, :, None] + turned * sin_BTH[:, :, None]
    return rotated.astype(heads_BTNH.dtype)


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched, short ones kept, a smooth ramp between."""
    rotations = rope.original_max_position * inverse / (2 * math.pi)
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return inverse * (smooth + (1 - smooth) / rope.factor)


def _yarn(rope: RopeConfig, inverse: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071), "NTK by parts": a ramp between two rotation counts."""

    def dimension(num_rotations: float) -> float:
        """The frequency index that turns `num_rotations` times over the trained length."""
        wavelength = rope.original_max_position / (num_rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Equal bounds would divide by zero; the ramp is then a step.
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    interpolated = np.clip(ramp, 0.0, 1.0)
    return inverse * (1 - interpolated) + inverse / rope.factor * interpolated


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
