"""Which backend serves a call: one rule for all ops, logged once and readable.

    backend     what runs                                 where
    "triton"    the Pallas kernel, compiled by Triton     NVIDIA GPUs, sm_80 and newer
    "xla"       reference.py, plain jnp                   everywhere
    "interpret" the Pallas kernel's body, run by jnp      everywhere; for tests
    None        "triton" where it can serve the call and is not expected to be slower, else "xla"

An explicit backend that cannot serve a call raises NotImplementedError with the reason.
`with preferring(backend):` is the explicit backend of the calls within that name none.
"""

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.devices import DEVICES, Device, device_of_kind

BACKENDS = ("triton", "xla", "interpret")

_logger = logging.getLogger("pallas_kernels")
_in_use: dict[str, list["Choice"]] = {}
_preferred: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "pallas_kernels_preferred_backend", default=None
)
_compile_target: contextvars.ContextVar[Device | None] = contextvars.ContextVar(
    "pallas_kernels_compile_target", default=None
)


@dataclass(frozen=True)
class Choice:
    """The backend that serves an op, and why it was taken."""

    backend: str
    reason: str


@dataclass(frozen=True)
class Target:
    """Where traced calls will run: jax's platform ("cpu", "gpu", ...) and, on a GPU, its device."""

    platform: str
    device: Device | None
    capability: tuple[int, int] | None


def target() -> Target:
    """The target of calls traced now: the default device, unless inside `compile_for`."""
    override = _compile_target.get()
    if override is not None:
        return Target("gpu", override, override.capability)
    default: Any = getattr(jax.config, "jax_default_device", None)
    jax_device = default if isinstance(default, jax.Device) else jax.devices()[0]
    capability = getattr(jax_device, "compute_capability", None)
    if jax_device.platform not in ("gpu", "cuda") or capability is None:
        return Target(jax_device.platform, None, None)
    major, minor = (int(part) for part in str(capability).split("."))
    return Target("gpu", device_of_kind(jax_device.device_kind, (major, minor)), (major, minor))


@contextlib.contextmanager
def compile_for(device_key: str) -> Iterator[Device]:
    """Within it, calls are traced for `DEVICES[device_key]`, which need not be there."""
    token = _compile_target.set(DEVICES[device_key])
    try:
        yield DEVICES[device_key]
    finally:
        _compile_target.reset(token)


@contextlib.contextmanager
def preferring(backend: str | None) -> Iterator[None]:
    """Within it, calls traced with backend=None are calls with `backend`."""
    token = _preferred.set(backend)
    try:
        yield
    finally:
        _preferred.reset(token)


def choose(op: str, requested: str | None, cannot: str | None, slower: str | None = None) -> Choice:
    """The backend for one call.

    Args:
      op: the op's name.
      requested: the caller's `backend`; None takes that of `preferring`.
      cannot: why the Pallas kernel cannot serve this call, or None.
      slower: why XLA is expected to be faster although the kernel could serve, or None.

    Raises:
      ValueError: `requested` is no backend.
      NotImplementedError: `requested` cannot serve.
    """
    requested = _preferred.get() if requested is None else requested
    where = target()
    no_gpu = None
    if where.platform != "gpu":
        no_gpu = f"it needs an NVIDIA GPU and the default device is {where.platform!r}"
    elif where.capability is not None and where.capability < (8, 0):
        no_gpu = f"it needs compute capability 8.0 and the device has {where.capability}"
    if requested is None:
        against = no_gpu or cannot or slower
        choice = Choice("xla", against) if against else Choice("triton", "it can serve the call")
    elif requested not in BACKENDS:
        raise ValueError(f"backend={requested!r}: must be one of {BACKENDS}, or None to choose")
    else:
        against = {"triton": no_gpu or cannot, "interpret": cannot, "xla": None}[requested]
        if against:
            raise NotImplementedError(
                f"{op}: backend={requested!r} cannot serve this call: {against}; "
                "backend=None takes one that can"
            )
        choice = Choice(requested, "requested")
    _record(op, choice)
    return choice


def in_use() -> dict[str, tuple[Choice, ...]]:
    """The choices made so far in this process, by op, each once, in order of first use."""
    return {op: tuple(choices) for op, choices in _in_use.items()}


def _record(op: str, choice: Choice) -> None:
    seen = _in_use.setdefault(op, [])
    if choice not in seen:
        seen.append(choice)
        _logger.info("%s is served by %s: %s", op, choice.backend, choice.reason)
