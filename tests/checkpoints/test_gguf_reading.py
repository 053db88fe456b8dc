"""Is every tensor and every setting of a GGUF file what it should be afterwards?"""

import dataclasses
import time

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from checkpoints_conv import open_checkpoint, read_params
from checkpoints_conv.gguf_config import llama3_frequency_factors
from checkpoints_conv.gguf_leaves import permute_rows, quant_tensor, tensor_name
from checkpoints_conv.gguf_reader import read_gguf
from checkpoints_conv.tree import leaf_nbytes
from helios_jax.config import RopeConfig
from helios_jax.model.rope import inverse_frequencies
from helios_jax.quant import QuantTensor
from tests.checkpoints.tiny_checkpoints import (
    BOS,
    EOS,
    TOKENS,
    VOCAB_SIZE,
    expected_dense,
    gguf_metadata,
    interleaved_rows,
    random_weights,
    tiny_config,
    write_gguf,
)

WRITABLE = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)
K_QUANTS = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K)
MAPPED = (Type.Q4_0, Type.Q4_1, Type.Q8_0)


def random_blocks(rng, tensor_type, rows, row_length):
    """Raw bytes of a quantised matrix. Bytes below 0x3c keep every float16 in them finite."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    shape = (rows, row_length // block_size * block_bytes)
    return rng.integers(0, 0x3C, shape, dtype=np.uint8)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_float32_weights_come_back_exactly(tmp_path, architecture):
    config = tiny_config(
        architecture, qkv_bias=architecture == "qwen2", qk_norm=architecture == "qwen3"
    )
    weights = random_weights(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights))
    leaves = dict(checkpoint.tensors())
    assert list(leaves) == list(weights)
    for path, array in weights.items():
        np.testing.assert_array_equal(leaves[path], expected_dense(path, array))
    # GGUF has no name of its own for mistral.
    expected = dataclasses.replace(
        config, architecture="llama" if architecture == "mistral" else architecture
    )
    assert checkpoint.config == expected
    assert checkpoint.format == "gguf"
    assert checkpoint.num_tensors == len(weights)
    assert checkpoint.nbytes == sum(array.nbytes for array in weights.values())


@pytest.mark.parametrize("tensor_type", WRITABLE, ids=lambda kind: kind.name)
def test_every_writable_type_keeps_its_values(tmp_path, tensor_type):
    config = tiny_config()
    weights = random_weights(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights, tensor_type)
    checkpoint = open_checkpoint(path)
    total = 0
    for leaf_path, leaf in checkpoint.tensors():
        source = weights[leaf_path]
        matrix = source.ndim == 2
        raw = gguf.quants.quantize(source, tensor_type) if matrix else source
        expected = gguf.quants.dequantize(raw, tensor_type) if matrix else source
        if matrix and tensor_type in MAPPED:
            assert isinstance(leaf, QuantTensor)
            found = np.asarray(leaf.dequantize(jnp.float32))
        else:
            dtypes = {Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}
            assert leaf.dtype == (dtypes.get(tensor_type, np.float32) if matrix else np.float32)
            found = expected_dense(leaf_path, leaf).astype(np.float32)
        np.testing.assert_array_equal(found, expected)
        total += leaf_nbytes(leaf)
    assert total == checkpoint.nbytes


@pytest.mark.parametrize("tensor_type", MAPPED, ids=lambda kind: kind.name)
def test_mapped_types_are_bit_for_bit(tensor_type):
    """All bit patterns of the codes, every dequantised float32 equal to the gguf package's."""
    rng = np.random.default_rng(1)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    raw = rng.integers(0, 256, (64, 8 * block_bytes), dtype=np.uint8)
    blocks = raw.reshape(64, 8, block_bytes)
    header = 4 if tensor_type == Type.Q4_1 else 2
    halves = rng.standard_normal((64, 8, header // 2)).astype(np.float16)
    blocks[..., :header] = halves.view(np.uint8)
    leaf = quant_tensor(raw, tensor_type)
    leaf.validate("leaf")
    assert (leaf.out_features, leaf.in_features) == (64, 8 * block_size)
    expected = gguf.quants.dequantize(raw, tensor_type)
    np.testing.assert_array_equal(np.asarray(leaf.dequantize(jnp.float32)), expected)
    # Bit for bit also means that the bytes can be written back.
    arrays = [leaf.scale] if leaf.offset is None else [leaf.scale, leaf.offset]
    rebuilt = np.concatenate(
        [
            np.stack(arrays, -1).view(np.uint8).reshape(64, 8, header),
            leaf.packed.view(np.uint8).reshape(64, 8, -1),
        ],
        axis=-1,
    )
    np.testing.assert_array_equal(rebuilt.reshape(raw.shape), raw)


@pytest.mark.parametrize("tensor_type", K_QUANTS, ids=lambda kind: kind.name)
def test_k_quants_are_dequantised_by_the_gguf_package(tmp_path, tensor_type):
    config = tiny_config(hidden_size=256, intermediate_size=256, head_dim=64, num_layers=1)
    rng = np.random.default_rng(2)
    weights = random_weights(config)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in gguf_metadata(config).items():
        if key != "general.architecture":
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
    expected = {}
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    for path, array in weights.items():
        if array.ndim == 1:
            writer.add_tensor(tensor_name(path), array)
            continue
        raw = random_blocks(rng, tensor_type, *array.shape)
        expected[path] = gguf.quants.dequantize(raw, tensor_type)
        if path[1:2] == ("attention",) and path[2] in heads:
            raw = interleaved_rows(raw, heads[path[2]])
        writer.add_tensor(tensor_name(path), raw, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    leaves = dict(open_checkpoint(tmp_path / "m.gguf").tensors())
    for path, array in expected.items():
        np.testing.assert_array_equal(leaves[path], expected_dense(path, array))


@pytest.mark.parametrize("tensor_type", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.F32])
def test_permuted_rows_of_four_heads_and_two_kv_heads_come_back(tmp_path, tensor_type):
    """Undoing the permutation on packed rows equals permuting nothing."""
    config = tiny_config()
    weights = random_weights(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights, tensor_type)
    leaves = dict(open_checkpoint(path).tensors())
    for name, num_heads in (("q", 4), ("k", 2)):
        source = weights["layers_1", "attention", name, "kernel"]
        leaf = leaves["layers_1", "attention", name, "kernel"]
        if tensor_type == Type.F32:
            np.testing.assert_array_equal(leaf.T, source)
        else:
            expected = quant_tensor(gguf.quants.quantize(source, tensor_type), tensor_type)
            np.testing.assert_array_equal(leaf.packed, expected.packed)
            np.testing.assert_array_equal(leaf.scale, expected.scale)
        assert not np.array_equal(interleaved_rows(source, num_heads), source)
        np.testing.assert_array_equal(
            permute_rows(interleaved_rows(source, num_heads), num_heads), source
        )


def test_biases_of_permuted_projections_are_permuted_too(tmp_path):
    config = tiny_config(qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    weights = random_weights(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights))
    assert checkpoint.config == config
    for path, leaf in checkpoint.tensors():
        np.testing.assert_array_equal(leaf, expected_dense(path, weights[path]))


def test_missing_head_means_tied(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, random_weights(config)))
    assert checkpoint.config.tie_word_embeddings
    assert ("lm_head", "kernel") not in dict(checkpoint.tensors())


@pytest.mark.parametrize("same", [True, False])
def test_head_present_although_tied(tmp_path, same):
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(config)
    head = weights["embed", "embedding"] + (0 if same else 1)
    path = write_gguf(tmp_path / "m.gguf", config, weights, extra={"output.weight": head})
    params = read_params(open_checkpoint(path))["params"]
    assert open_checkpoint(path).config.tie_word_embeddings == same
    if same:
        assert "lm_head" not in params
    else:
        np.testing.assert_array_equal(params["lm_head"]["kernel"], head.T)


def test_explicit_head_dim_and_sliding_window(tmp_path):
    config = tiny_config("qwen3", head_dim=32, qk_norm=True, sliding_window=64)
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        random_weights(config),
        metadata={"qwen3.attention.sliding_window": 64},
    )
    assert open_checkpoint(path).config == config


def test_tokenizer_generation_and_end_tokens(tmp_path):
    config = tiny_config()
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        random_weights(config),
        metadata={
            "tokenizer.ggml.eot_token_id": 258,
            "tokenizer.ggml.eom_token_id": EOS,
            "general.sampling.temp": 0.6,
            "general.sampling.top_k": 20,
            "general.sampling.top_p": 0.95,
        },
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.eos_token_ids == (EOS, 258)
    assert checkpoint.config.bos_token_id == BOS
    assert checkpoint.generation == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("thé")) == "thé"
    assert checkpoint.tokenizer.vocab_size == VOCAB_SIZE == len(TOKENS)


def rope_of(tmp_path, metadata, factors=None, theta=1e4, **changes):
    config = tiny_config(rope=RopeConfig(theta=theta), **changes)
    extra = {} if factors is None else {"rope_freqs.weight": factors.astype(np.float32)}
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        random_weights(config),
        metadata={f"llama.{key}": value for key, value in metadata.items()},
        extra=extra,
    )
    return open_checkpoint(path).config


def test_linear_rope(tmp_path):
    expected = RopeConfig(rope_type="linear", factor=4.0)
    metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert rope_of(tmp_path, metadata).rope == expected
    # llama.cpp reads a factor without a type as linear, and the older key alike.
    assert rope_of(tmp_path, {"rope.scaling.factor": 4.0}).rope == expected
    assert rope_of(tmp_path, {"rope.scale_linear": 4.0}).rope == expected
    assert rope_of(tmp_path, {"rope.scaling.type": "none"}).rope == RopeConfig()


def test_yarn_rope(tmp_path):
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    config = rope_of(tmp_path, metadata)
    assert config.rope == RopeConfig(rope_type="yarn", factor=4.0, original_max_position=64)
    assert config.max_model_len == 256
    scaled = rope_of(tmp_path, metadata | {"rope.scaling.attn_factor": 2.0}).rope
    assert scaled.attention_factor == pytest.approx(2 * (0.1 * np.log(4) + 1))


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0),
        RopeConfig(5e5, "llama3", 32.0, 8192, 1.0, 4.0),
        RopeConfig(5e5, "llama3", 16.0, 2048, 1.0, 8.0),
    ],
    ids=["llama-3.1", "llama-3.2", "other parameters"],
)
def test_llama3_rope_is_derived_from_its_factors(tmp_path, rope):
    factors = llama3_frequency_factors(rope, 64)
    derived = rope_of(tmp_path, {}, factors, theta=rope.theta, head_dim=128, hidden_size=512).rope
    assert derived == rope
    plain, _ = inverse_frequencies(RopeConfig(rope.theta), 128)
    scaled, _ = inverse_frequencies(derived, 128)
    np.testing.assert_allclose(plain / scaled, factors, rtol=1e-12)


def test_neutral_frequency_factors_are_no_scaling(tmp_path):
    assert rope_of(tmp_path, {}, np.ones(8)).rope == RopeConfig()


def test_other_frequency_factors_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"m\.gguf.*rope_freqs\.weight.*llama3 formula"):
        rope_of(tmp_path, {}, np.linspace(1, 3, 8))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight' and rope scaling 'linear'"):
        rope_of(tmp_path, {"rope.scaling.factor": 2.0}, np.linspace(1, 3, 8))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight.*must be F32 of shape \(8,\)"):
        rope_of(tmp_path, {}, np.ones(4))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, r"general\.architecture='mamba': must be one of"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type='longrope'"),
        ({"llama.expert_count": 8}, r"llama\.expert_count=8"),
        ({"llama.final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count=8: must be RoPE over the"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.block_count": "two"}, r"block_count='two': must be an integer"),
        ({"llama.block_count": 2**31}, r"2147483648 layers, but there are only \d+ tensors"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv=\[2, 4\]: must be the same"),
        ({"llama.attention.head_count_kv": 3}, r"num_kv_heads=3: must divide"),
        ({"llama.attention.head_count": 0}, r"num_heads=0"),
        ({"llama.rope.freq_base": float("nan")}, r"rope\.freq_base=nan: must be a finite number"),
        ({"tokenizer.ggml.eos_token_id": 9999}, r"eos_token_ids\[0\]=9999"),
        ({"tokenizer.ggml.bos_token_id": "1"}, r"bos_token_id='1': must be an integer"),
        ({"split.count": 3}, r"split into 3 files; merge them"),
    ],
)
def test_metadata_that_is_not_implemented_is_named(tmp_path, metadata, message):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), metadata=metadata)
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{message}") as error:
        open_checkpoint(path)
    assert str(error.value).count("m.gguf") == 1


def test_wrong_tensors_are_named(tmp_path):
    config = tiny_config()
    weights = random_weights(config)

    def message(weights, **extra):
        path = write_gguf(tmp_path / "m.gguf", config, weights, **extra)
        with pytest.raises(ValueError) as error:
            open_checkpoint(path)
        assert str(path) in str(error.value)
        return str(error.value)

    without = {path: array for path, array in weights.items() if path[-2:] != ("up", "kernel")}
    assert "'blk.0.ffn_up.weight' is missing: expected shape (96, 64)" in message(without)
    misshapen = {"blk.1.ffn_up.weight": np.zeros((64, 64), np.float32)}
    expected = "'blk.1.ffn_up.weight' has shape (64, 64): the configuration needs (96, 64)"
    assert expected in message(weights, extra=misshapen)
    unknown = {"blk.0.ssm_a": np.zeros(4, np.float32)}
    assert "unexpected tensor 'blk.0.ssm_a' of shape (4,)" in message(weights, extra=unknown)


def test_tensor_type_that_is_not_implemented_is_named(tmp_path):
    config = tiny_config(hidden_size=256, intermediate_size=256, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), Type.TQ1_0)
    with pytest.raises(ValueError, match=r"tensor 'token_embd\.weight' has type TQ1_0: must be"):
        open_checkpoint(path)


def test_header_agrees_with_the_gguf_package(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), Type.Q4_1)
    mine, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert mine.metadata[key] == field.contents(), key
    assert len(theirs.tensors) == len(mine.tensors)
    for tensor in theirs.tensors:
        found = mine.tensors[tensor.name]
        assert (found.type, found.offset, found.nbytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert found.shape == tuple(tensor.shape.tolist()[::-1])
        assert mine.read(tensor.name).tobytes() == tensor.data.tobytes()


def test_embedded_model(smollm2_gguf_path):
    """SmolLM2-135M-Instruct: the facts about it, and Q4_1 bit for bit."""
    started = time.perf_counter()
    checkpoint = open_checkpoint(smollm2_gguf_path)
    assert time.perf_counter() - started < 2
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope == RopeConfig(theta=1e5)
    assert (config.max_model_len, config.vocab_size) == (8192, 49152)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    reader = read_gguf(smollm2_gguf_path)
    kinds = []
    for path, leaf in checkpoint.tensors():
        kinds.append(leaf.bits if isinstance(leaf, QuantTensor) else "dense")
        if path[0] in ("layers_0", "layers_29") and path[-1] == "kernel":
            name = {
                "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
                "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
            }[path[2]]  # fmt: skip
            name = f"blk.{path[0][7:]}.{name}.weight"
            expected = gguf.quants.dequantize(reader.read(name), Type.Q4_1)
            num_heads = {"q": 9, "k": 3}.get(path[2])
            if num_heads is not None:
                expected = permute_rows(expected, num_heads)
            np.testing.assert_array_equal(np.asarray(leaf.dequantize(jnp.float32)), expected)
    assert len(kinds) == checkpoint.num_tensors == 272
    assert (kinds.count(4), kinds.count(8), kinds.count("dense")) == (210, 1, 61)
