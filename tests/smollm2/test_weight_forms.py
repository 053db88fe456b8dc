"""How far are the forms that serve from float32? KL divergence on 2,000 tokens of docstrings."""

import argparse
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.cache import DenseCache
from helios_jax.model.forms import serving_form
from helios_jax.quant.expanded import MAX_INT8_ROWS

NUM_ROWS, NUM_TOKENS = 2, 1000
# Decoded one by one, which takes seconds.
NUM_DECODED = 250
LIMITS = {"bfloat16": 1e-3, "int8": 1e-2}


@pytest.fixture(scope="module")
def tokens_BT(checkpoint):
    """Text that every machine has: docstrings of the standard library."""
    documented = [argparse, argparse.ArgumentParser, textwrap, textwrap.TextWrapper, inspect]
    documented += [inspect.Signature, dict, str.format, int, list, range, bytes, memoryview, print]
    documented += [vars(np)[name] for name in ("dot", "einsum", "reshape", "where", "sum", "sort")]
    text = "\n\n".join(inspect.getdoc(thing) or "" for thing in documented)
    ids = checkpoint.tokenizer.encode(text)[: NUM_ROWS * NUM_TOKENS]
    return jnp.asarray(ids, jnp.int32).reshape(NUM_ROWS, NUM_TOKENS)


@pytest.fixture(scope="module")
def reference_BTV(float32_form, tokens_BT):
    return jax.jit(float32_form.model.apply)(float32_form.params, tokens_BT)


@jax.jit
def kl_divergence(reference_BTV, logits_BTV):
    """Mean over positions of sum p (log p - log q), nats."""
    p, q = jax.nn.log_softmax(reference_BTV), jax.nn.log_softmax(logits_BTV)
    return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1))


@pytest.mark.parametrize("dtype", LIMITS)
def test_many_rows(checkpoint, stored_params, tokens_BT, reference_BTV, dtype):
    """Prefill: bfloat16 products in both forms."""
    form = serving_form(checkpoint.config, stored_params, dtype)
    logits_BTV = jax.jit(form.model.apply)(form.params, tokens_BT)
    kl = float(kl_divergence(reference_BTV, logits_BTV))
    print(f"{dtype}, all tokens at once: KL {kl:.5f}")
    assert kl < LIMITS["bfloat16"]


def test_few_rows(checkpoint, stored_params, tokens_BT, reference_BTV):
    """Decoding token by token with the int8 form's int8 rows and its bfloat16 KV cache."""
    tokens_BT, reference_BTV = tokens_BT[:, :NUM_DECODED], reference_BTV[:, :NUM_DECODED]
    assert NUM_ROWS <= MAX_INT8_ROWS
    form = serving_form(checkpoint.config, stored_params, "int8")

    @jax.jit
    def decode(params, tokens_BT):
        cache = DenseCache.create(form.model.config, NUM_ROWS, NUM_DECODED, form.cache_dtype)

        def step(cache, token_and_position):
            token_B, position = token_and_position
            positions_B1 = jnp.full((NUM_ROWS, 1), position)
            logits_B1V, cache = form.model.apply(params, token_B[:, None], positions_B1, cache)
            return cache, logits_B1V[:, 0]

        positions_T = jnp.arange(NUM_DECODED, dtype=jnp.int32)
        return jax.lax.scan(step, cache, (tokens_BT.T, positions_T))[1].swapaxes(0, 1)

    kl = float(kl_divergence(reference_BTV, decode(form.params, tokens_BT)))
    print(f"int8, token by token: KL {kl:.5f}")
    assert kl < LIMITS["int8"]


def test_int4_form_computes_what_is_stored(checkpoint, stored_params, float32_form, tokens_BT):
    """The stored form, dequantised in the matmul, is bfloat16-close to the float32 form."""
    form = serving_form(checkpoint.config, stored_params, "int4")
    few_BT = tokens_BT[:, :8]
    logits_BTV = jax.jit(form.model.apply)(form.params, few_BT)
    reference_BTV = jax.jit(float32_form.model.apply)(float32_form.params, few_BT)
    assert float(kl_divergence(reference_BTV, logits_BTV)) < LIMITS["bfloat16"]
