"""Is a written GGUF file the same model to the gguf package and to our reader?"""

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from checkpoints_conv import convert, open_checkpoint
from checkpoints_conv.gguf_reader import read_gguf
from helios_jax.config import RopeConfig
from helios_jax.quant import QuantTensor
from tests.checkpoints.tiny_checkpoints import (
    assert_same_leaves,
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)
from tests.checkpoints.tiny_quantised import copy_fixture

K_PROJ = ("layers_0", "attention", "k", "kernel")


def tensor_bytes(path):
    opened = read_gguf(path)
    return {name: (info.type, opened.read(name).tobytes()) for name, info in opened.tensors.items()}


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.F16, Type.F32, Type.BF16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gguf_file_comes_back_bit_for_bit(tmp_path, kind, architecture):
    """GGUF -> native -> GGUF, q and k permuted again."""
    config = tiny_config(architecture, qk_norm=architecture == "qwen3")
    source = write_gguf(tmp_path / "a.gguf", config, random_weights(config), kind)
    convert(source, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "b.gguf", format="gguf", verify=True)
    before, after = tensor_bytes(source), tensor_bytes(tmp_path / "b.gguf")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name] == after[name], name
    found = open_checkpoint(tmp_path / "b.gguf")
    assert found.config == config
    assert found.tokenizer.fingerprint() == open_checkpoint(source).tokenizer.fingerprint()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q4_0"])
def test_dense_weights_are_quantised_as_by_the_package(tmp_path, kind):
    config = tiny_config("qwen2", qkv_bias=True)
    weights = random_weights(config)
    source = write_huggingface(tmp_path / "a", config, weights)
    convert(source, tmp_path / "b.gguf", format="gguf", quant_type=kind, verify=True)
    reader = gguf.GGUFReader(tmp_path / "b.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.0.attn_k.weight"].tensor_type == Type[kind]
    assert tensors["blk.0.attn_k.bias"].tensor_type == Type.F32
    expected = gguf.quants.quantize(weights[K_PROJ], Type[kind])
    np.testing.assert_array_equal(tensors["blk.0.attn_k.weight"].data, expected)
    file_type = reader.fields["general.file_type"].contents()
    assert gguf.LlamaFileType(file_type).name == f"MOSTLY_{kind}"


@pytest.mark.parametrize(
    ("name", "kind", "stored", "exact"),
    [
        ("compressed_w4a16", None, "Q4_0", True),  # its bfloat16 scales are float16 numbers too
        ("gptqmodel_8bit_sym", None, "Q8_0", True),
        ("autoawq", "Q8_0", "Q8_0", True),  # code - zero fits 8 bits
        ("auto_gptq_3bit", None, "Q4_0", True),
        ("autoawq", "Q4_1", "Q4_1", False),
        ("autoawq", None, "Q8_0", True),
    ],
)
def test_codes_of_other_formats_are_kept_where_they_fit(tmp_path, name, kind, stored, exact):
    source = copy_fixture(name, tmp_path / "a")
    convert(source, tmp_path / "b.gguf", format="gguf", quant_type=kind, verify=True)
    expected = dict(open_checkpoint(source).tensors())[K_PROJ]
    found = dict(open_checkpoint(tmp_path / "b.gguf").tensors())[K_PROJ]
    assert isinstance(found, QuantTensor)
    assert (found.bits, found.offset is not None) == {
        "Q4_0": (4, False),
        "Q4_1": (4, True),
        "Q8_0": (8, False),
    }[stored]
    difference = np.abs(np.asarray(found.dequantize()) - expected.dequantize())
    # Q4_1's minimum, -scale * zero, is rounded to float16.
    allowed = 0 if exact else 2.0**-11 * np.abs(expected.scale * expected.zero).max()
    assert difference.max() <= allowed


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        RopeConfig(rope_type="linear", factor=2.0),
        RopeConfig(rope_type="yarn", factor=4.0, original_max_position=32, beta_fast=16.0),
        RopeConfig(rope_type="yarn", factor=4.0, original_max_position=32, attention_factor=1.5),
    ],
)
def test_configurations(tmp_path, rope):
    config = tiny_config(rope=rope, sliding_window=64, head_dim=32)
    # Written from a native checkpoint: the tests' own GGUF writer knows no scaling.
    plain = write_gguf(tmp_path / "a.gguf", tiny_config(head_dim=32), random_weights(config))
    convert(plain, tmp_path / "native")
    import dataclasses

    from checkpoints_conv.write_gguf import write_gguf as write

    checkpoint = dataclasses.replace(
        open_checkpoint(tmp_path / "native"), config=config, generation={"temperature": 0.5}
    )
    write(tmp_path / "b.gguf", checkpoint, quant_type="F16")
    found = open_checkpoint(tmp_path / "b.gguf")
    assert found.generation == {"temperature": 0.5}
    if rope.attention_factor is not None:
        assert found.config.rope.attention_factor == pytest.approx(1.5)
        found_rope = dataclasses.replace(found.config.rope, attention_factor=1.5)
        assert found_rope == rope
    else:
        assert found.config == config


def test_bfloat16_weights(tmp_path):
    config = tiny_config()
    source = write_huggingface(tmp_path / "a", config, random_weights(config), ml_dtypes.bfloat16)
    convert(source, tmp_path / "b.gguf", format="gguf", verify=True)
    leaves = dict(open_checkpoint(source).tensors())
    found = dict(open_checkpoint(tmp_path / "b.gguf").tensors())
    matrices = {path for path, leaf in leaves.items() if leaf.ndim == 2}
    assert_same_leaves(
        {path: found[path] for path in matrices}, {path: leaves[path] for path in matrices}
    )
    assert all(leaf.dtype == np.float32 for path, leaf in found.items() if path not in matrices)


def test_rows_that_fill_no_block(tmp_path):
    config = tiny_config(hidden_size=48, num_heads=2, head_dim=24, intermediate_size=64)
    source = write_huggingface(tmp_path / "a", config, random_weights(config))
    convert(source, tmp_path / "b.gguf", format="gguf", quant_type="Q4_0", verify=True)
    types = {name: kind.name for name, (kind, _) in tensor_bytes(tmp_path / "b.gguf").items()}
    assert types["blk.0.ffn_up.weight"] == "F16" and types["blk.0.ffn_down.weight"] == "Q4_0"


@pytest.mark.parametrize("template", [None, "{{ x }}", {"default": "{{ a }}", "tool_use": "b"}])
def test_tokenizers(tmp_path, template):
    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 258}
    if isinstance(template, str):
        metadata["tokenizer.chat_template"] = template
    elif template is not None:
        metadata["tokenizer.chat_template"] = template["default"]
        metadata["tokenizer.chat_template.tool_use"] = template["tool_use"]
    config = tiny_config(eos_token_ids=(257, 258))
    source = write_gguf(tmp_path / "a.gguf", config, random_weights(config), metadata=metadata)
    convert(source, tmp_path / "b.gguf", format="gguf", quant_type="F16")
    before, after = (open_checkpoint(path).tokenizer for path in (source, tmp_path / "b.gguf"))
    for name in ("bos_token_id", "eos_token_ids", "add_bos", "add_eos", "chat_template"):
        assert getattr(after, name) == getattr(before, name)
    assert after.fingerprint() == before.fingerprint()
    text = "thé <eos> 123 Don't\n\n x"
    assert after.encode(text) == before.encode(text)


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁helo", "he", "ll"]
SPM_TOKENS += ["hell", "hello", "▁hello"]


def test_sentencepiece_tokenizers(tmp_path):
    """Scores are made anew from the merges; texts are split as before."""
    scores = [0.0] * 264 + [-float(i) for i in range(len(SPM_TOKENS) - 264)]
    padded = SPM_TOKENS + [f"<pad{i}>" for i in range(288 - len(SPM_TOKENS))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(SPM_TOKENS) - 259) + [3] * (288 - len(SPM_TOKENS))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": padded,
        "tokenizer.ggml.scores": scores + [0.0] * (288 - len(scores)),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    config = tiny_config(bos_token_id=1, eos_token_ids=(2,))
    source = write_gguf(tmp_path / "a.gguf", config, random_weights(config), metadata=metadata)
    convert(source, tmp_path / "b.gguf", format="gguf", quant_type="F16")
    before, after = (open_checkpoint(path).tokenizer for path in (source, tmp_path / "b.gguf"))
    assert after.fingerprint() == before.fingerprint()
    for text in ("hello", "hell hello", "ohé lle\n", "</s>hel"):
        assert after.encode(text) == before.encode(text)
    assert "▁hello" in [after.id_to_token(token) for token in after.encode("hello")]


def test_what_gguf_cannot_express(tmp_path):
    dynamic = RopeConfig(rope_type="dynamic", factor=2.0, original_max_position=64)
    config = tiny_config(activation="gelu")
    source = write_huggingface(
        tmp_path / "a", config, random_weights(config), changes={"hidden_act": "gelu"}
    )
    with pytest.raises(ValueError, match=r"activation='gelu': GGUF's llama models have silu"):
        convert(source, tmp_path / "b.gguf", format="gguf", quant_type="F16")
    changes = {
        "rope_scaling": {"type": dynamic.rope_type, "factor": 2.0},
        "max_position_embeddings": 64,
    }
    config = tiny_config()
    source = write_huggingface(tmp_path / "c", config, random_weights(config), changes=changes)
    with pytest.raises(ValueError, match=r"rope_type='dynamic': GGUF cannot express it"):
        convert(source, tmp_path / "b.gguf", format="gguf", quant_type="F16")
    assert not (tmp_path / "b.gguf").exists()
