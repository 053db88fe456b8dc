"""Are drafts what they are said to be: pruned, narrowed, of few tokens, and exact?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_conv import open_checkpoint, read_params, write_checkpoint
from helios_jax.distill import (
    PrunedShape,
    Student,
    draft_config,
    initialise,
    prune,
    reduce_vocabulary,
    write_draft,
)
from helios_jax.distill.architectures import dense
from helios_jax.generation import generate
from helios_jax.model import Transformer
from helios_jax.quant import Scheme, rtn
from helios_jax.sampling import SamplingParams, stack_sampling
from helios_jax.speculative import (
    DraftModel,
    DraftVocabulary,
    ReducedParams,
    speculative_generate,
)
from tests import tiny
from tests.distill.conftest import CONFIG, changed, target_params

V = CONFIG.vocab_size


def logits(config, params, tokens):
    return np.asarray(Transformer(config).apply(params, tokens))


TOKENS = np.random.default_rng(0).integers(V, size=(2, 12)).astype(np.int32)


def vocabulary(num_tokens: int = 40) -> DraftVocabulary:
    counts = np.random.default_rng(1).integers(50, size=V)
    table = target_params()["params"]["embed"]["embedding"]
    return reduce_vocabulary(counts, table, num_tokens, always=(256, 257))


def test_a_model_that_keeps_all_computes_the_same():
    config, params = prune(CONFIG, target_params(), PrunedShape((0, 1)))
    assert config == CONFIG
    np.testing.assert_array_equal(
        logits(config, params, TOKENS), logits(CONFIG, target_params(), TOKENS)
    )


def test_chosen_layers_run_in_order():
    config, params = prune(CONFIG, target_params(), PrunedShape((1,)))
    assert config.num_layers == 1
    theirs = target_params()["params"]["layers_1"]
    assert jax.tree.all(jax.tree.map(np.array_equal, params["params"]["layers_0"], theirs))


def test_channels_that_do_nothing_are_the_ones_left_out():
    params = target_params()
    ffn = params["params"]["layers_0"]["ffn"]
    dead = np.array([3, 10, 40])
    ffn["down"]["kernel"] = ffn["down"]["kernel"].copy()
    ffn["down"]["kernel"][dead] = 0
    one = changed(CONFIG, num_layers=1)
    whole = {"params": {k: v for k, v in params["params"].items() if k != "layers_1"}}
    config, pruned = prune(CONFIG, params, PrunedShape((0,), intermediate_size=61))
    assert pruned["params"]["layers_0"]["ffn"]["up"]["kernel"].shape == (32, 61)
    np.testing.assert_allclose(
        logits(config, pruned, TOKENS), logits(one, whole, TOKENS), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("tied", [True, False])
def test_every_leaf_of_a_narrowed_model_fits(tied):
    full = changed(
        CONFIG, qk_norm=True, qkv_bias=True, attention_output_bias=True, mlp_bias=True,
        tie_word_embeddings=tied,
    )  # fmt: skip
    shape = PrunedShape((1, 0), intermediate_size=24, hidden_size=20)
    config, params = prune(full, target_params(full), shape, vocabulary())
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (20, 24, 40)
    assert np.isfinite(logits(config, params, TOKENS % 40)).all()


def test_a_quantised_target_is_pruned_as_what_it_stands_for():
    params = target_params()
    layer = params["params"]["layers_0"]["ffn"]
    kernel = layer["up"]["kernel"]
    layer["up"] = {"kernel": jax.tree.map(np.asarray, rtn(jnp.asarray(kernel.T), Scheme(8, 32)))}
    _, pruned = prune(CONFIG, params, PrunedShape((0,)))
    found = pruned["params"]["layers_0"]["ffn"]["up"]["kernel"]
    assert found.shape == kernel.shape and 0 < np.abs(found - kernel).max() < 0.02


@pytest.mark.parametrize(
    "shape, message",
    [
        (PrunedShape((2,)), r"layers=\(2,\): must be one or more of 0..1"),
        (PrunedShape(()), "must be one or more"),
        (PrunedShape((0,), intermediate_size=65), "intermediate_size=65: must be in 1..64"),
        (PrunedShape((0,), hidden_size=0), "hidden_size=0: must be in 1..32"),
    ],
)
def test_what_the_target_does_not_have_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        prune(CONFIG, target_params(), shape)


def test_a_vocabulary_holds_the_most_frequent_and_reads_the_others_as_their_nearest():
    table = np.eye(6, dtype=np.float32)
    table[4] = [0, 3, 0.1, 0, 0, 0]
    found = reduce_vocabulary(np.array([5, 9, 9, 0, 1, 0]), table, 4, always=(5,))
    assert found.ids_U.tolist() == [0, 1, 2, 5]
    assert found.nearest_V.tolist()[:3] == [0, 1, 2] and found.nearest_V[4] == 1
    assert found.draft_ids_V.tolist() == [0, 1, 2, -1, -1, 3]
    with pytest.raises(ValueError, match="must be of 1..6 tokens"):
        reduce_vocabulary(np.ones(6), table, 7, always=(5,))


@pytest.mark.parametrize(
    "ids, nearest", [([2, 1], [0, 1, 0]), ([0, 3], [0, 1, 1]), ([0, 1], [0, 0, 1]), ([0], [0, 1])]
)
def test_a_vocabulary_that_contradicts_itself_is_refused(ids, nearest):
    with pytest.raises(ValueError, match="draft vocabulary"):
        DraftVocabulary(np.array(ids, np.int32), np.array(nearest, np.int32))


def test_a_shape_of_its_own_begins_with_the_leaves_that_fit():
    reduced = vocabulary()
    config = draft_config(CONFIG, reduced, intermediate_size=16, num_layers=1)
    params = initialise(config, jax.random.key(0), target_params(), reduced)["params"]
    theirs = target_params()["params"]
    np.testing.assert_array_equal(
        params["embed"]["embedding"], theirs["embed"]["embedding"][reduced.ids_U]
    )
    attention = params["layers_0"]["attention"]["q"]["kernel"]
    np.testing.assert_array_equal(attention, theirs["layers_0"]["attention"]["q"]["kernel"])
    assert params["layers_0"]["ffn"]["up"]["kernel"].shape == (32, 16)
    with pytest.raises(ValueError, match="unknown configuration field"):
        draft_config(CONFIG, num_layer=1)


def prompts():
    random = np.random.default_rng(4)
    tokens = random.integers(V, size=(4, 7)).astype(np.int32)
    return jnp.asarray(tokens), jnp.asarray([7, 3, 5, 1], jnp.int32)


def reduced_draft(num_tokens: int = 200) -> tuple[DraftModel, ReducedParams]:
    reduced = vocabulary(num_tokens)
    config, params = prune(CONFIG, target_params(), PrunedShape((0, 1)), reduced)
    model = DraftModel(Transformer(config), num_target_tokens=V)
    return model, ReducedParams.of(params, reduced)


@pytest.mark.slow
def test_a_draft_of_few_tokens_leaves_greedy_text_as_it_is():
    model, params = Transformer(CONFIG), target_params()
    sampling = stack_sampling([SamplingParams(temperature=0.0, seed=0)] * 4, vocab_size=V)
    plain = generate(model, params, *prompts(), sampling, 20)
    # One that knows all tokens of this text, and is the target otherwise: every draft is right.
    counts = np.bincount(np.concatenate([np.ravel(prompts()[0]), np.ravel(plain.tokens)]) % V)
    counts = np.pad(counts, (0, V - len(counts)))
    table = target_params()["params"]["embed"]["embedding"]
    enough = reduce_vocabulary(counts, table, 120, always=(256, 257))
    # And one that lacks most of them.
    for reduced, num_rounds in ((enough, 4), (vocabulary(120), None)):
        config, pruned = prune(CONFIG, params, PrunedShape((0, 1)), reduced)
        draft = DraftModel(Transformer(config), num_target_tokens=V)
        extra = ReducedParams.of(pruned, reduced)
        output = speculative_generate((model, params), (draft, extra), *prompts(), sampling, 20)
        np.testing.assert_array_equal(output.tokens, plain.tokens)
        assert num_rounds is None or int(output.num_rounds) == num_rounds


@pytest.mark.slow
def test_sampled_tokens_may_be_ones_that_the_draft_lacks():
    """The first token's law is the target's, whether the draft knows it or not."""
    from tests.chi_square import chi_square_p

    model, params = Transformer(CONFIG), target_params()
    B = 1500
    tokens = jnp.tile(prompts()[0][:1], (B, 1))
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed in range(B)]
    sampling = stack_sampling(rows, vocab_size=V)
    draft = reduced_draft(60)
    lengths = jnp.full(B, 7, jnp.int32)
    output = speculative_generate(
        (model, params), draft, tokens, lengths, sampling, 1, max_num_draft_tokens=2
    )
    law = np.asarray(jax.nn.softmax(logits(CONFIG, params, tokens[:1])[0, -1]), np.float64)
    counts = np.bincount(np.asarray(output.tokens[:, 0]), minlength=V)
    assert chi_square_p(counts, law) > 1e-4
    # The bulk of the law lies on tokens that the draft lacks: the test is about something.
    known = np.asarray(draft[1].draft_ids_V) >= 0
    assert law[~known].sum() > 0.3


def test_parameters_and_model_must_agree_about_the_vocabulary():
    model, params = Transformer(CONFIG), target_params()
    sampling = stack_sampling([SamplingParams(temperature=0.0, seed=0)] * 4, vocab_size=V)
    draft, reduced = reduced_draft()
    for wrong in (
        (dataclasses.replace(draft, num_target_tokens=None), reduced),
        (draft, reduced.model),
    ):
        with pytest.raises(ValueError, match="belong together|different vocabularies"):
            speculative_generate((model, params), wrong, *prompts(), sampling, 4)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_written_draft_is_read_with_its_vocabulary(tmp_path, bits):
    config = changed(CONFIG, hidden_size=64, intermediate_size=64)
    reduced = reduce_vocabulary(
        np.arange(V), np.random.default_rng(0).normal(size=(V, 8)), 64, always=(256, 257)
    )
    student = Student(*prune(config, target_params(config), PrunedShape((0,)), reduced), reduced)
    out = tmp_path / "draft"
    write_draft(student, student.params, tiny.tokenizer(), out, {"shape": None}, bits)
    found = open_checkpoint(out)
    assert found.draft_vocabulary is not None
    assert np.array_equal(found.draft_vocabulary.ids_U, reduced.ids_U)
    assert np.array_equal(found.draft_vocabulary.nearest_V, reduced.nearest_V)
    source = found.describe_source()
    assert source["draft_vocabulary_tokens"] == 64 and source["num_params"] > 0
    params = dense(read_params(found))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(student.params), strict=True):
        assert np.abs(a - b).max() <= 0.01 * np.abs(b).max()
    with pytest.raises(ValueError, match="format='huggingface' cannot hold"):
        write_checkpoint(found, tmp_path / "other", format="huggingface")
    (out / "vocabulary.npz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="vocabulary.npz: does not match its sum"):
        open_checkpoint(out)
