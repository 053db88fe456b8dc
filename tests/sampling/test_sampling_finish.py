"""Tokens drawn several at once end a row where drawing them one by one would have."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.sampling import (
    LENGTH,
    NON_FINITE,
    RUNNING,
    STOP,
    SamplingParams,
    end_rows,
    stack_sampling,
)

B, T = 4, 5
SAMPLING = stack_sampling(
    [SamplingParams(temperature=0, stop_token_ids=[7])] * (B - 1)
    + [SamplingParams(temperature=0, ignore_eos=True)],
    vocab_size=10,
    eos_token_ids=(2,),
)
STOPS = [{2, 7}] * (B - 1) + [set()]
end = jax.jit(end_rows)


def one_by_one(tokens, stops, room):
    kept = []
    for token in tokens:
        if len(kept) == room:
            break
        if token < 0:
            return kept, NON_FINITE
        kept.append(token)
        if token in stops:
            return kept, STOP
    return kept, LENGTH if len(kept) == room else RUNNING


ROW = st.tuples(
    st.lists(st.sampled_from([-1, 0, 1, 2, 7, 9]), min_size=T, max_size=T),
    st.integers(0, T),
    st.integers(1, T + 1),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(ROW, min_size=B, max_size=B))
def test_rows_end_as_if_tokens_came_one_by_one(rows):
    tokens, counts, rooms = (np.array(part, np.int32) for part in zip(*rows, strict=True))
    ended = end(tokens, counts, SAMPLING, rooms)
    for b in range(B):
        kept, reason = one_by_one(tokens[b, : counts[b]].tolist(), STOPS[b], rooms[b])
        assert ended.tokens_BT[b].tolist() == kept + [-1] * (T - len(kept))
        assert (ended.num_tokens_B[b], ended.finish_reason_B[b]) == (len(kept), reason)


def test_the_first_stop_wins_over_the_length():
    tokens = np.tile(np.array([4, 2, 5, 0, 0], np.int32), (B, 1))
    ended = end(tokens, np.full(B, 3, np.int32), SAMPLING, np.full(B, 2, np.int32))
    assert ended.tokens_BT[0].tolist() == [4, 2, -1, -1, -1] and ended.finish_reason_B[0] == STOP
