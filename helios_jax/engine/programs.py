"""When is what compiled? The stages of a step, each once for its sizes, several at a time.

Compiling takes seconds and a step needs several programs, so they are compiled side by side, and
those that the next step will need while this one runs. A program is kept for the process: another
engine of the same shapes finds it.
"""

import contextvars
import gc
import math
import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax

from helios_jax.engine.chunk import run_chunk
from helios_jax.engine.rounds import run_rounds
from helios_jax.engine.step import admit, end_step, plan_step
from helios_jax.model.compiler import COMPILER_OPTIONS

_STATIC = {
    "admit": (admit, ("config",)),
    "plan": (plan_step, ("config", "urgency")),
    "chunk": (run_chunk, ("model", "config", "variant")),
    "rounds": (run_rounds, ("model", "config", "variant")),
    "end": (end_step, ("config",)),
}
# More than what compiles at a time takes.
_SPARE_MAPS = 8_000
_lock = threading.Lock()
_compiled: dict[Hashable, Future] = {}


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix="helios-compile")


def stage(name: str, platform: str) -> Any:
    """A stage under jit, with what `COMPILER_OPTIONS` has for the platform.

    A new function each time: JAX keeps what it compiled for as long as the function lives.
    """
    function, static = _STATIC[name]
    options = COMPILER_OPTIONS.get(platform)
    return jax.jit(
        partial(function), static_argnames=static, donate_argnames="state", compiler_options=options
    )


class Programs:
    """The compiled stages of one engine.

    `request` starts compiling, `run` waits for that and calls. A key stands for the shapes of the
    arguments, which are looked at only the first time.
    """

    def __init__(self):
        self._futures: dict[Hashable, Future] = {}

    @property
    def num_programs(self) -> int:
        """Programs that this engine asked for; constant once it is warm."""
        return len(self._futures)

    def request(self, name: str, key: Hashable, arguments: tuple, **static: Hashable) -> None:
        """Sees to it that stage `name` is being compiled for these arguments."""
        if (name, key) not in self._futures:
            self._futures[name, key] = _request(name, arguments, static)

    def run(self, name: str, key: Hashable, arguments: tuple, **static: Hashable) -> Any:
        """Calls stage `name`; its `state` is donated."""
        self.request(name, key, arguments, **static)
        return self._futures[name, key].result()(*arguments)


def forget() -> None:
    """Frees the programs that no engine holds."""
    with _lock:
        _compiled.clear()


def _request(name: str, arguments: tuple, static: dict[str, Hashable]) -> Future:
    leaves, structure = jax.tree.flatten(arguments)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x)) for x in leaves]
    where = tuple((s.shape, s.dtype, s.sharding) for s in shapes)
    full_key = (name, tuple(sorted(static.items(), key=lambda item: item[0])), structure, where)
    with _lock:
        known = _compiled.get(full_key)
        if known is None or (known.done() and known.exception() is not None):
            job = partial(
                _compile,
                stage(name, jax.default_backend()),
                jax.tree.unflatten(structure, shapes),
                static,
            )
            context = contextvars.copy_context()
            _compiled[full_key] = _workers().submit(context.run, job)
        return _compiled[full_key]


def _sharding(array: Any) -> Any:
    """Of a parameter that lies on a mesh; None lets the compiler choose the default device."""
    sharding = getattr(array, "sharding", None)
    return sharding if sharding is not None and sharding.num_devices > 1 else None


def _compile(jitted: Any, arguments: tuple, static: dict[str, Any]) -> Any:
    _make_room()
    return jitted.lower(*arguments, **static).compile()


def _make_room() -> None:
    """Frees what no engine holds where memory maps run short: XLA ends the process without one.

    On a CPU each program takes a thousand of the 65,530 that Linux gives a process.

    Raises:
      MemoryError: they are held by engines.
    """
    for attempt in range(2):
        used, limit = _memory_maps()
        if used <= limit - _SPARE_MAPS:
            return
        if attempt == 0:
            forget()
            gc.collect()
    raise MemoryError(
        f"compiled programs hold {used:,} of the {limit:,} memory maps that a process may have; "
        "raise the limit (sysctl vm.max_map_count), or serve fewer kinds of requests and sizes"
    )


def _memory_maps() -> tuple[int, float]:
    """How many this process has, and may have."""
    maps, limit = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
    if not (maps.exists() and limit.exists()):
        return 0, math.inf
    return maps.read_bytes().count(b"\n"), int(limit.read_text())
