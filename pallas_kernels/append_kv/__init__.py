"""Writing new keys and values into a paged pool, quantised, in place."""

from pallas_kernels.append_kv.api import append_kv
from pallas_kernels.append_kv.bytes import cost

__all__ = ["append_kv", "cost"]
