"""Do the sharded ops equal the plain ones, split over two devices, without communication?"""

import os
import subprocess
import sys
from pathlib import Path

# Two CPU devices exist only where asked for before jax starts: a process of its own.
PROGRAM = """
import re
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pallas_kernels import append_kv as a, int4_matmul as m, paged_attention as p, sharding
from pallas_kernels.int4_matmul import shapes as ms
from pallas_kernels.paged_attention import shapes as ps

mesh = Mesh(np.array(jax.devices()), ("model",))
assert mesh.size == 2

def same(name, plain, sharded, *arrays):
    run = jax.jit(sharded).lower(*arrays).compile()
    text = run.as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text), name
    for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(run(*arrays))):
        np.testing.assert_array_equal(x, y, name)

def put(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))

for backend in ("xla", "interpret"):
    (x, packed, scale), k = ms.arguments(ms.Case(5, 64, 128, 64, bias=True))
    zero, bias = k.pop("zero"), k.pop("bias")
    same(
        "matmul", m.int4_matmul(x, packed, scale, zero=zero, bias=bias, backend=backend, **k),
        lambda x, w, s, z, b: sharding.sharded_int4_matmul(
            mesh, "model", x, w, s, zero=z, bias=b, backend=backend, **k),
        x, put(packed, "model"), put(scale, "model"), put(zero, "model"), put(bias, "model"),
    )
    (x, packed, scale), k = ms.arguments(
        ms.Case(5, 64, 128, 64, gate_activation="silu", num_layers=2))
    zero, layer = k.pop("zero"), k.pop("layer")
    halves = [put(v.reshape(2, 2, 32, -1), None, None, "model") for v in (packed, scale, zero)]
    same(
        "gated", m.int4_matmul(x, packed, scale, zero=zero, layer=layer, backend=backend, **k),
        lambda x, w, s, z: sharding.sharded_int4_matmul(
            mesh, "model", x, w, s, zero=z, layer=layer, backend=backend, **k),
        x, *halves,
    )
    (q, kp, vp, *rest), k = ps.arguments(ps.Case(2, 3, 64, ((37, 2), (20, 1))))
    ks, vs = k.pop("k_scale_K"), k.pop("v_scale_K")
    heads = [put(v, None, "model") for v in (q, kp, vp)]
    same(
        "attention",
        p.paged_attention(q, kp, vp, *rest, k_scale_K=ks, v_scale_K=vs, backend=backend, **k),
        lambda q, kp, vp, ks, vs: sharding.sharded_paged_attention(
            mesh, "model", q, kp, vp, *rest, k_scale_K=ks, v_scale_K=vs, backend=backend, **k),
        *heads, put(ks, "model"), put(vs, "model"),
    )
    new = np.random.default_rng(0).normal(size=(3, 2, 64)).astype(np.float32)
    slot = np.array([3, -1, 17], np.int32)
    same(
        "append", a.append_kv(kp, vp, new, new, slot, kv_dtype="int8", backend=backend),
        lambda kp, vp, n: sharding.sharded_append_kv(
            mesh, "model", kp, vp, n, n, slot, kv_dtype="int8", backend=backend),
        *heads[1:], put(new, None, "model"),
    )
print("equal")
"""


def test_two_devices():
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.stdout.strip() == "equal", run.stderr[-3000:]
