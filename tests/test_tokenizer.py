"""Do text and token ids turn into each other exactly as the models' own tokenizers do it?"""

import json
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from helios_jax.tokenizer import IncrementalDecoder, Tokenizer
from helios_jax.tokenizer.spelling import byte_alphabet

DATA = Path(__file__).parent / "data"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def read_json(name):
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def gguf_values(**values):
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_level_values(pre="gpt-2", extra=(), extra_types=(), **values):
    """A byte-level vocabulary of all bytes, four merged tokens, and what the test adds."""
    tokens = [*byte_alphabet(), "th", "the", "Ġt", "Ġthe", *extra]
    return gguf_values(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[NORMAL] * 260 + list(extra_types),
        merges=["t h", "th e", "Ġ t", "Ġ the"],
        **values,
    )


def byte_level_tokenizer(**values):
    return Tokenizer.from_gguf_metadata(
        byte_level_values(
            extra=["<s>", "</s>", "<user>"],
            extra_types=[CONTROL, CONTROL, USER_DEFINED],
            bos_token_id=260,
            eos_token_id=261,
            **values,
        )
    )


@pytest.fixture(scope="module")
def sentencepiece():
    """A BPE model that the sentencepiece library trained, and the ids it gives for some texts."""
    return read_json("tokenizer/sentencepiece.json")


def sentencepiece_tokenizer(model, **values):
    return Tokenizer.from_gguf_metadata(
        gguf_values(
            model="llama",
            tokens=model["pieces"],
            scores=model["scores"],
            token_type=model["types"],
            **values,
        )
    )


# --- The embedded model ---


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf_path):
    reader = gguf.GGUFReader(smollm2_gguf_path)
    metadata = {
        name: entry.contents()
        for name, entry in reader.fields.items()
        if name.startswith("tokenizer.")
    }
    return Tokenizer.from_gguf_metadata(metadata)


def test_smollm2_gives_the_ids_of_its_own_tokenizer(smollm2):
    cases = read_json("smollm2_tokenizer.json")
    assert len(cases) == 198
    wrong = [case["text"] for case in cases if smollm2.encode(case["text"]) != case["ids"]]
    assert wrong == []


def test_smollm2_decodes_back_what_it_can_spell(smollm2):
    for case in read_json("smollm2_tokenizer.json"):
        # The vocabulary lacks a few control characters, which encoding leaves out.
        expected = "".join(c for c in case["text"] if smollm2.encode(c))
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == expected
        stream = IncrementalDecoder(smollm2, skip_special_tokens=False)
        pieces = [stream.push([token_id]) for token_id in case["ids"]]
        assert "".join(pieces) + stream.flush() == expected
        assert not any("\ufffd" in piece for piece in pieces)


def test_smollm2_chat_prompt(smollm2):
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode(prompt)
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, (2,), 49152)
    assert ids.count(1) == 3 and ids.count(2) == 2  # one <|im_start|> a message, one <|im_end|>


# --- Byte-level BPE from GGUF values ---


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2"])
def test_pre_tokenizers_split_like_their_regular_expressions(name):
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_values(pre=name))
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    for case in read_json("tokenizer/pre_tokenizers.json"):
        pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(case["text"])
        found = [bytes(byte_of[c] for c in piece).decode() for piece, _ in pieces]
        assert found == case[name]


def test_merges_apply_within_words_only():
    tokenizer = byte_level_tokenizer()
    assert tokenizer.encode("the the") == [257, 259]
    assert tokenizer.encode("th") == [256]
    assert tokenizer.encode("t h") == [ord("t"), 32, ord("h")]


def test_smollm_splits_every_digit():
    values = byte_level_values(pre="smollm", extra=["12"], extra_types=[NORMAL])
    values["tokenizer.ggml.merges"].append("1 2")
    assert Tokenizer.from_gguf_metadata(values).encode("12") == [ord("1"), ord("2")]
    values["tokenizer.ggml.pre"] = "gpt-2"
    assert Tokenizer.from_gguf_metadata(values).encode("12") == [260]


def test_llama_bpe_takes_a_known_word_whole():
    # No merges lead to "word": Llama 3 takes it because it is in the vocabulary, GPT-2 does not.
    letters = [ord(c) for c in "word"]
    for pre, expected in (("llama-bpe", [260]), ("gpt-2", letters), ("qwen2", letters)):
        values = byte_level_values(pre=pre, extra=["word"], extra_types=[NORMAL])
        assert Tokenizer.from_gguf_metadata(values).encode("word") == expected


def test_qwen2_composes_characters():
    values = byte_level_values(pre="qwen2")
    assert Tokenizer.from_gguf_metadata(values).encode("e\u0301") == list("é".encode())


def test_special_tokens_in_text_are_those_tokens():
    tokenizer = byte_level_tokenizer()
    assert tokenizer.encode("a</s><user>b") == [ord("a"), 261, 262, ord("b")]
    assert tokenizer.decode([97, 261, 262, 98]) == "a<user>b"
    assert tokenizer.decode([97, 261, 262, 98], skip_special_tokens=False) == "a</s><user>b"
    assert tokenizer.special_token_ids == {260, 261}


def test_names_of_tokens():
    tokenizer = byte_level_tokenizer()
    assert tokenizer.id_to_token(259) == "Ġthe" and tokenizer.token_to_id("Ġthe") == 259
    assert tokenizer.token_bytes(259) == b" the" and tokenizer.token_bytes(0xE9) == b"\xe9"
    assert tokenizer.token_to_id("absent") is None
    assert tokenizer.vocab_size == 263
    # Embeddings are often padded beyond the vocabulary: such ids have no text.
    assert tokenizer.id_to_token(5000) is None and tokenizer.decode([97, 5000]) == "a"
    with pytest.raises(ValueError, match="token_id=-1"):
        tokenizer.decode([-1])


def test_an_added_token_of_latin_letters_is_not_read_as_bytes():
    values = byte_level_values(extra=["<é>"], extra_types=[USER_DEFINED])
    tokenizer = Tokenizer.from_gguf_metadata(values)
    assert tokenizer.encode("<é>") == [260] and tokenizer.decode([260]) == "<é>"


# --- SentencePiece from GGUF values ---


def test_sentencepiece_gives_the_ids_of_the_sentencepiece_library(sentencepiece):
    tokenizer = sentencepiece_tokenizer(sentencepiece)
    for case in sentencepiece["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"].replace("▁", " ")


def test_sentencepiece_defaults_are_llamas(sentencepiece):
    tokenizer = sentencepiece_tokenizer(sentencepiece)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.add_bos) == (1, (2,), True)
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.token_bytes(tokenizer.token_to_id("<0x0A>")) == b"\n"


def test_sentencepiece_space_prefix(sentencepiece):
    tokenizer = sentencepiece_tokenizer(sentencepiece)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hello"
    assert IncrementalDecoder(tokenizer, at_start=False).push(ids) == " hello"
    two_spaces = tokenizer.encode("  hello", add_special_tokens=False)
    assert tokenizer.decode(two_spaces) == "  hello"

    bare = sentencepiece_tokenizer(sentencepiece, add_space_prefix=False)
    with_space = bare.encode(" hello", add_special_tokens=False)
    assert with_space == ids
    assert bare.decode(with_space) == " hello"


def test_sentencepiece_bytes_join_to_characters(sentencepiece):
    tokenizer = sentencepiece_tokenizer(sentencepiece)
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    assert tokenizer.decode(ids) == "😀"
    # A stray byte spoils itself only, not the good character beside it.
    assert tokenizer.decode([*ids, tokenizer.token_to_id("<0x80>")]) == "😀\ufffd"


# --- BOS, EOS ---


def test_bos_comes_exactly_once():
    tokenizer = byte_level_tokenizer(add_bos_token=True)
    assert tokenizer.encode("a") == [260, 97]
    assert tokenizer.encode("<s>a") == [260, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.encode("") == [260]
    for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        messages = [{"role": "user", "content": "a"}]
        prompt = tokenizer.apply_chat_template(messages, chat_template=template)
        assert tokenizer.encode(prompt) == [260, 97]


def test_without_add_bos_an_empty_text_has_no_tokens():
    assert byte_level_tokenizer().encode("") == []


def test_llama_bpe_adds_bos_unless_told_otherwise():
    assert byte_level_tokenizer(pre="llama-bpe").add_bos
    assert not byte_level_tokenizer(pre="llama-bpe", add_bos_token=False).add_bos
    assert not byte_level_tokenizer(pre="qwen2").add_bos


def test_add_eos():
    assert byte_level_tokenizer(add_eos_token=True).encode("a") == [97, 261]
    assert byte_level_tokenizer(add_eos_token=True).encode("a</s>") == [97, 261]


def test_gguf_end_tokens_are_united():
    tokenizer = byte_level_tokenizer(eot_token_id=262, eom_token_id=261)
    assert tokenizer.eos_token_ids == (261, 262)
    assert tokenizer.decode([97, 262]) == "a"  # what ends a text is special


# --- Bad input ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, r"model='t5'.*'gpt2', 'llama'"),
        ({"pre": "tekken"}, r"pre='tekken'.*'llama-bpe'.*'smollm'"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["th"]}, r"merges\[0\]='th'"),
        ({"merges": ["t x y"]}, "merges do not fit"),
        ({"token_type": [1]}, "token_type has 1 values.*260"),
        ({"bos_token_id": 260}, r"bos_token_id=260: must be in 0\.\.259"),
        ({"eos_token_id": -1}, "eos_token_id=-1"),
        ({"tokens": [*byte_alphabet(), "th", "the", "th", "Ġt"]}, "ids 256 and 258 are both 'th'"),
        ({"add_bos_token": True}, "add_bos=True: needs a bos_token_id"),
        ({"add_eos_token": True}, "add_eos=True: needs eos_token_ids"),
    ],
)
def test_bad_gguf_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf_metadata(byte_level_values() | gguf_values(**change))


def test_sentencepiece_needs_a_score_per_token(sentencepiece):
    values = gguf_values(model="llama", tokens=sentencepiece["pieces"], scores=[0.0])
    with pytest.raises(ValueError, match="scores has 1 values.*560"):
        Tokenizer.from_gguf_metadata(values)


@pytest.mark.parametrize("text", ["a\ud800", b"a", None])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(ValueError, match="text.* must be"):
        byte_level_tokenizer().encode(text)


def test_ids_of_special_tokens_are_checked():
    backend = byte_level_tokenizer().backend
    with pytest.raises(ValueError, match=r"bos_token_id=263: must be in 0\.\.262"):
        Tokenizer(backend, bos_token_id=263)
    with pytest.raises(ValueError, match=r"eos_token_ids\[1\]=-2"):
        Tokenizer(backend, eos_token_ids=(1, -2))


def test_a_decoder_of_unknown_kind_is_refused():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ValueError, match="decoder=None"):
        Tokenizer(backend).decode([0])
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece.*not implemented"):
        Tokenizer(backend).decode([0])


# --- Hugging Face folders ---


def write_huggingface(folder, config=None, post_processor=None, **files):
    """A folder with a byte-level tokenizer of 258 tokens: 256 is <s>, 257 is </s>."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    if post_processor is not None:
        backend.post_processor = post_processor
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


BOS_FIRST = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])


def test_huggingface_folder(tmp_path):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "T"}
    write_huggingface(tmp_path, config, BOS_FIRST)
    tokenizer = Tokenizer.from_huggingface(tmp_path, eos_token_ids=[7, 257])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257, 7))
    assert tokenizer.chat_template == "T"
    # BOS as the post-processor says; neither the cut nor the padding of the file.
    assert tokenizer.encode("abcdef") == [256, *b"abcdef"]
    assert tokenizer.encode("a") == [256, 97]


def test_huggingface_bos_follows_tokenizer_json_then_the_config(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    write_huggingface(tmp_path, config)
    assert Tokenizer.from_huggingface(tmp_path).add_bos
    write_huggingface(tmp_path, config, processors.ByteLevel())
    assert not Tokenizer.from_huggingface(tmp_path).add_bos
    # Without a config, what the post-processor puts in front is BOS.
    (tmp_path / "tokenizer_config.json").unlink()
    write_huggingface(tmp_path, None, BOS_FIRST)
    tokenizer = Tokenizer.from_huggingface(tmp_path)
    assert tokenizer.add_bos and tokenizer.bos_token_id == 256


def test_huggingface_special_tokens_map(tmp_path):
    write_huggingface(tmp_path, {}, special_tokens_map_DOT_json='{"eos_token": "</s>"}')
    assert Tokenizer.from_huggingface(tmp_path).eos_token_ids == (257,)


def test_huggingface_tokens_of_the_config_only(tmp_path):
    listed = {"content": "<|tool|>", "special": True, "normalized": False, "__type": "AddedToken"}
    write_huggingface(tmp_path, {"added_tokens_decoder": {"258": listed}})
    tokenizer = Tokenizer.from_huggingface(tmp_path)
    assert tokenizer.encode("<|tool|>") == [258] and tokenizer.decode([258]) == ""
    write_huggingface(tmp_path, {"added_tokens_decoder": {"300": listed}})
    with pytest.raises(ValueError, match=r"states id 300 for '<\|tool\|>'.*gives it 258"):
        Tokenizer.from_huggingface(tmp_path)


def test_huggingface_end_token_becomes_special(tmp_path):
    write_huggingface(tmp_path, {"eos_token": "z"})
    tokenizer = Tokenizer.from_huggingface(tmp_path)
    assert tokenizer.eos_token_ids == (ord("z"),)
    assert tokenizer.decode(list(b"az")) == "a"


def test_huggingface_templates(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    write_huggingface(tmp_path, {"chat_template": named})
    messages = [{"role": "user", "content": "a"}]
    tokenizer = Tokenizer.from_huggingface(tmp_path)
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[]) == "U"
    assert tokenizer.apply_chat_template(messages, chat_template="tool_use") == "U"
    # A file of its own comes first.
    write_huggingface(
        tmp_path,
        {"chat_template": named},
        chat_template_DOT_jinja="F",
        additional_chat_templates__rag_DOT_jinja="R",
    )
    tokenizer = Tokenizer.from_huggingface(tmp_path)
    assert tokenizer.chat_template == {"default": "F", "rag": "R"}
    (tmp_path / "additional_chat_templates" / "rag.jinja").unlink()
    assert Tokenizer.from_huggingface(tmp_path).chat_template == "F"


def test_huggingface_errors(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json is missing.*save_pretrained"):
        Tokenizer.from_huggingface(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable tokenizer.json"):
        Tokenizer.from_huggingface(tmp_path)
    write_huggingface(tmp_path, {"eos_token": "<|gone|>"})
    with pytest.raises(ValueError, match=r"eos_token='<\|gone\|>' is not in the vocabulary"):
        Tokenizer.from_huggingface(tmp_path)
    write_huggingface(tmp_path, tokenizer_config_DOT_json="[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        Tokenizer.from_huggingface(tmp_path)
    write_huggingface(tmp_path, tokenizer_config_DOT_json="{")
    with pytest.raises(ValueError, match="not readable JSON"):
        Tokenizer.from_huggingface(tmp_path)
    twice = processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 256)])
    write_huggingface(tmp_path, {"bos_token": "<s>"}, twice)
    with pytest.raises(ValueError, match=r"puts tokens \[256, 256\] before"):
        Tokenizer.from_huggingface(tmp_path)


def test_huggingface_metaspace_decoder(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "h": 1, "i": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_huggingface(tmp_path)
    assert tokenizer.encode("hi hi") == [0, 1, 2, 0, 1, 2]
    assert tokenizer.decode([0, 1, 2, 0, 1, 2]) == "hi hi"
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    assert Tokenizer(backend).decode([0, 1, 2]) == " hi"


# --- The native form ---


@pytest.mark.parametrize("template", [None, "{{ 'é' }}", {"default": "a", "tool_use": "b"}])
def test_save_and_load(tmp_path, template, sentencepiece):
    for i, original in enumerate(
        [
            byte_level_tokenizer(add_bos_token=True, eot_token_id=262),
            sentencepiece_tokenizer(sentencepiece),
        ]
    ):
        original = Tokenizer(
            original.backend, original.bos_token_id, original.eos_token_ids, True, True, template
        )
        folder = tmp_path / str(i)
        original.save(folder)
        loaded = Tokenizer.load(folder)
        for name in ("bos_token_id", "eos_token_ids", "add_bos", "add_eos", "chat_template"):
            assert getattr(loaded, name) == getattr(original, name)
        assert loaded.fingerprint() == original.fingerprint()
        assert loaded.backend.to_str() == original.backend.to_str()
        text = "the  thé <s> 😀</s>\n"
        assert loaded.encode(text) == original.encode(text)
        assert loaded.decode(loaded.encode(text)) == original.decode(original.encode(text))


def test_load_errors(tmp_path):
    with pytest.raises(ValueError, match="tokenizer_config.json is missing"):
        Tokenizer.load(tmp_path)
    byte_level_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(ValueError, match="must hold exactly the keys.*from_huggingface"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        Tokenizer.load(tmp_path)


def test_fingerprint_tells_vocabularies_apart():
    values = byte_level_values()
    same = Tokenizer.from_gguf_metadata(byte_level_values()).fingerprint()
    assert Tokenizer.from_gguf_metadata(values).fingerprint() == same
    assert len(same) == 64

    swapped = list(values["tokenizer.ggml.tokens"])
    swapped[3], swapped[5] = swapped[5], swapped[3]
    reordered = values["tokenizer.ggml.merges"][::-1]
    for change in (
        {"tokens": swapped},
        {"merges": reordered},
        {"token_type": [CONTROL] + [NORMAL] * 259},
    ):
        other = Tokenizer.from_gguf_metadata(values | gguf_values(**change))
        assert other.fingerprint() != same, change

    # Which tokens end a text is no matter of the vocabulary.
    backend = Tokenizer.from_gguf_metadata(values).backend
    assert Tokenizer(backend, eos_token_ids=(7,)).fingerprint() == same
