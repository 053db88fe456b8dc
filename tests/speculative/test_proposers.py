"""Proposers on their own: lookups, drafts that end early, a user's own proposer, trees."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.cache.paged import init_pools
from helios_jax.model import Transformer, init_params
from helios_jax.sampling import SamplingParams, stack_sampling
from helios_jax.speculative import (
    Draft,
    PromptLookup,
    Proposer,
    ProposerState,
    RoundRows,
    Speculation,
    SpeculationParams,
    Tree,
    begin,
    draw_drafts,
    only_tokens,
    private_rows,
    run_rows,
    speculative_round,
)
from helios_jax.speculative.prompt_lookup import find_suffix
from tests import tiny
from tests.speculative import law

B, S, J = 4, 20, 5
STATIC: Any = dict(
    static_argnames=("max_num_draft_tokens", "vocab_size"), compiler_options=law.UNOPTIMISED
)
find = jax.jit(find_suffix, static_argnums=(2, 3))


def plain_search(tokens, min_ngram, max_ngram):
    """The end of the latest earlier occurrence of the longest suffix."""
    tokens = list(tokens)
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if n <= len(tokens) - 1 and tokens[end - n + 1 : end + 1] == tokens[-n:]:
                return end
    return -1


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=S), min_size=B, max_size=B),
    st.integers(0, 9),
)
def test_a_suffix_is_found_as_by_plain_search(rows, filler):
    """Whatever lies beyond a row's tokens."""
    tokens_BS = np.full((B, S), filler % 3, np.int32)
    for b, row in enumerate(rows):
        tokens_BS[b, : len(row)] = row
    found = find(tokens_BS, np.array([len(row) for row in rows], np.int32), 2, 4)
    assert found.tolist() == [plain_search(row, 2, 4) for row in rows]


def lookup_rows(*rows):
    tokens_BS = np.zeros((len(rows), S), np.int32)
    for b, row in enumerate(rows):
        tokens_BS[b, : len(row)] = row
    return RoundRows(
        tokens_BS=jnp.asarray(tokens_BS),
        num_known_B=jnp.asarray([len(row) for row in rows], jnp.int32),
        num_output_B=jnp.zeros(len(rows), jnp.int32),
        sampling=stack_sampling([SamplingParams(temperature=0)] * len(rows), vocab_size=50),
        history=None,
        hidden_BD=jnp.zeros((len(rows), 1)),
        kv=private_rows(len(rows), S, "float32"),
        vocab_size=50,
    )


def test_a_lookup_drafts_what_followed_and_repeats_a_loop():
    rows = lookup_rows([1, 2, 3, 4, 5, 6, 7, 2, 3], [7, 8, 9, 7, 8], [1, 2, 3], [4, 4, 4])
    wanted_B = jnp.array([5, 5, 5, 2], jnp.int32)
    draft, _ = PromptLookup().propose(None, ProposerState(), rows, wanted_B, J)
    assert draft.num_draft_B.tolist() == [5, 5, 0, 2] and draft.q_BJV is None
    assert draft.tokens_BJ[0].tolist() == [4, 5, 6, 7, 2]
    assert draft.tokens_BJ[1].tolist() == [9, 7, 8, 9, 7]
    assert draft.tokens_BJ[3, :2].tolist() == [4, 4]


def test_a_draft_ends_before_what_the_model_is_not_sure_of():
    """By the model's distribution, not by the token drawn: the law stays what it was."""
    confident_V = jnp.log(jnp.array([0.9, 0.05, 0.05]))
    unsure_V = jnp.log(jnp.array([0.4, 0.3, 0.3]))
    row_B1 = jnp.arange(3)[:, None]

    @partial(jax.jit, compiler_options=law.UNOPTIMISED)
    def draw(unsure_V, confident_V, sampling):
        return draw_drafts(
            lambda memory: (jnp.stack([unsure_V, confident_V, confident_V]), memory),
            lambda memory, tokens_B, place, active_B: (
                jnp.where((place == 0) & (row_B1 == 1), unsure_V, confident_V),
                memory + 1,
            ),
            jnp.int32(1), sampling, None, jnp.zeros(3, jnp.int32), jnp.full(3, 4, jnp.int32),
            max_num_draft_tokens=4, vocab_size=3, min_confidence=0.5,
        )  # fmt: skip

    def run(unsure_V, confident_V, temperature=1.0):
        sampling = stack_sampling(
            [SamplingParams(seed=i, temperature=temperature) for i in range(3)], vocab_size=3
        )
        draft, passes = draw(unsure_V, confident_V, sampling)
        return draft, int(passes)

    draft, passes = run(unsure_V, confident_V)
    assert draft.num_draft_B.tolist() == [0, 1, 4] and passes == 4
    assert np.all(np.asarray(draft.tokens_BJ[1, 1:]) == -1)
    greedy, _ = run(unsure_V, confident_V, temperature=0.0)
    assert greedy.num_draft_B.tolist() == [0, 1, 4]
    draft, passes = run(unsure_V, unsure_V)
    assert draft.num_draft_B.tolist() == [0, 0, 0] and passes == 1


def test_a_smaller_or_larger_draft_vocabulary_drafts_real_tokens_only():
    sampling = stack_sampling([SamplingParams(seed=i) for i in range(64)], vocab_size=5)
    for width in (3, 8):
        logits_BV = jnp.zeros((64, width))
        draft, _ = jax.jit(draw_drafts, static_argnums=(0, 1), **STATIC)(
            lambda memory, x=logits_BV: (x, memory),
            lambda memory, tokens_B, place, active_B, x=logits_BV: (x, memory),
            (), sampling, None, jnp.zeros(64, jnp.int32), jnp.full(64, 2, jnp.int32),
            max_num_draft_tokens=2, vocab_size=5,
        )  # fmt: skip
        assert set(np.unique(draft.tokens_BJ)) == set(range(min(width, 5)))
        np.testing.assert_allclose(draft.q_BJV.sum(2), 1, rtol=1e-6)
        assert draft.q_BJV.shape == (64, 2, 5)


def test_what_is_no_token_ends_a_draft():
    draft = Draft(jnp.array([[1, 2, 3], [1, -1, 3], [9, 1, 1]]), jnp.array([3, 3, 3]), None)
    assert only_tokens(draft, jnp.array([2, 3, 3]), 9).num_draft_B.tolist() == [2, 1, 0]


@dataclass(frozen=True)
class FromHidden(Proposer):
    """A user's proposer: `params` is the target's head, which it puts on the hidden state it is
    given. That is what the last known token was drawn from, so it drafts that token again."""

    def propose(self, params, state, rows, num_draft_B, max_num_draft_tokens):
        tokens_B = jnp.argmax(rows.hidden_BD @ params, axis=1).astype(jnp.int32)
        tokens_BJ = jnp.tile(tokens_B[:, None], (1, max_num_draft_tokens))
        return Draft(tokens_BJ, num_draft_B, None), state


def test_a_proposer_of_ones_own_sees_the_targets_hidden_states():
    """After prompts, and after rounds that accepted some tokens or none."""
    config = tiny.config(vocab_size=32, num_layers=1, bos_token_id=None, eos_token_ids=())
    model, params = Transformer(config), init_params(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, params)
    extra = SpeculationParams(params["params"]["embed"]["embedding"].T)
    speculation = Speculation(FromHidden(), 2)
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 6)), jnp.int32)
    sampling = SamplingParams(temperature=0, max_tokens=30).to_arrays(4, vocab_size=32)

    @partial(jax.jit, compiler_options=law.UNOPTIMISED)
    def start(sampling):
        return begin(
            (model, params), speculation, extra, prompts, jnp.array([6, 4, 1, 3]), sampling,
            max_new_tokens=30,
        )  # fmt: skip

    @partial(jax.jit, compiler_options=law.UNOPTIMISED)
    def turn(kv, sampling, state):
        return speculative_round((model, params), speculation, extra, kv, sampling, state)

    kv, state = start(sampling)
    likely_BSV = jax.jit(model.apply)(params, prompts)
    # Of the prompt, the state before the last token's.
    second = likely_BSV[jnp.arange(4), jnp.array([4, 2, 0, 1])].argmax(1)
    expected = np.asarray(second)
    counts = set()
    for i in range(8):
        before = state
        state, record = turn(kv, sampling, state)
        known = slice(None) if i else np.array([0, 1, 3])  # one row has a single token
        np.testing.assert_array_equal(record.tokens_BJ[known, 0], expected[known])
        counts |= set(np.asarray(record.num_accepted_B).tolist())
        assert np.all(state.num_known_B > before.num_known_B)
        expected = np.asarray(state.tokens_BS)[np.arange(4), np.asarray(state.num_known_B) - 1]
    assert len(counts) > 1, "both kinds of rounds occurred"


def test_a_tree_of_drafts_sees_its_own_branches_only():
    """Two branches in one pass have the hidden states that each has on its own."""
    config = tiny.config(vocab_size=32, num_layers=2, bos_token_id=None, eos_token_ids=())
    model, params = Transformer(config), init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 32, (1, 7)).astype(np.int32)
    # Token 0, then the branches 1-2 and 3-4.
    tokens, parents = np.array([[5, 6, 7, 8, 9]], np.int32), [-1, 0, 1, 0, 3]
    mask = np.zeros((1, 5, 5), bool)
    depth = np.zeros((1, 5), np.int32)
    for i, parent in enumerate(parents):
        mask[0, i] = mask[0, parent] if parent >= 0 else False
        mask[0, i, i] = True
        depth[0, i] = depth[0, parent] + 1 if parent >= 0 else 0
    kv = private_rows(1, 16, "float32")
    run = jax.jit(run_rows, static_argnums=0, compiler_options=law.UNOPTIMISED)

    def after(tokens, tree=None):
        pools = init_pools(config, kv.num_blocks)
        start, count = jnp.zeros(1, jnp.int32), jnp.full(1, 7, jnp.int32)
        _, pools = run(model, params, pools, kv, prompt, start, count)
        count = jnp.full(1, tokens.shape[1], jnp.int32)
        return run(model, params, pools, kv, tokens, start + 7, count, tree)[0][0]

    whole = after(tokens, Tree(jnp.asarray(mask), jnp.asarray(depth)))
    for branch in ([0, 1, 2], [0, 3, 4]):
        np.testing.assert_allclose(whole[np.array(branch)], after(tokens[:, branch]), atol=1e-5)
    chain = after(tokens)
    assert np.abs(np.asarray(whole - chain))[3:].max() > 1e-3, "the branches matter"
