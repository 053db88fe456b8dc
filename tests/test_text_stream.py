"""Is streamed text exactly the text, with nothing shown too early and the tokens counted right?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helios_jax.tokenizer import IncrementalDecoder, StopStringMatcher, Tokenizer
from helios_jax.tokenizer.spelling import byte_alphabet

SPECIAL = 256


def byte_tokenizer():
    return Tokenizer.from_gguf_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": [*byte_alphabet(), "<end>", "Ġno"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 1],
            "tokenizer.ggml.merges": [],
        }
    )


def prefix_tokenizer():
    """SentencePiece-style: 0 <unk>, 1 <s>, 2 </s>, 3 "▁", 4 "▁a", 5 "b", 6.. the bytes."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "▁a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    return Tokenizer.from_gguf_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1] + [6] * 256,
        }
    )


BYTES = byte_tokenizer()
PREFIX = prefix_tokenizer()


@st.composite
def chunked(draw, elements):
    """A list of elements, cut into consecutive chunks, some of them empty."""
    items = draw(st.lists(elements, max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    bounds = [0, *cuts, len(items)]
    return [items[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


# Bytes that make and break UTF-8: beginnings of 2-, 3- and 4-byte characters, continuations, ASCII.
tricky_bytes = st.sampled_from(b"a \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff\xc0\xed\xa0\x80")


def push_all(decoder, chunks):
    pieces = [decoder.push(chunk) for chunk in chunks]
    return "".join(pieces) + decoder.flush()


def test_an_emoji_of_four_tokens_appears_at_the_last():
    decoder = IncrementalDecoder(BYTES)
    assert [decoder.push([byte]) for byte in "😀".encode()] == ["", "", "", "😀"]
    assert decoder.flush() == ""


def test_a_lone_continuation_byte_is_bad_at_once():
    decoder = IncrementalDecoder(BYTES)
    assert decoder.push([0x80]) == "\ufffd"
    assert decoder.push([0xF0]) == "" and decoder.push([ord("a")]) == "\ufffda"
    assert decoder.push([0xE2, 0x82]) == "" and decoder.flush() == "\ufffd"


@given(chunked(tricky_bytes | st.integers(0, 255)))
def test_pushes_join_to_the_text_of_the_bytes(chunks):
    ids = [token_id for chunk in chunks for token_id in chunk]
    expected = bytes(ids).decode(errors="replace")
    assert push_all(IncrementalDecoder(BYTES), chunks) == expected
    assert BYTES.decode(ids) == expected


@given(chunked(st.integers(0, 5) | tricky_bytes.map(lambda byte: byte + 6)))
def test_pushes_join_to_the_text_with_a_space_prefix(chunks):
    ids = [token_id for chunk in chunks for token_id in chunk]
    spelled = {0: b"", 1: b"", 2: b"", 3: b" ", 4: b" a", 5: b"b"}
    whole = b"".join(spelled.get(i, bytes([max(i - 6, 0)])) for i in ids)
    expected = whole.decode(errors="replace")
    assert push_all(IncrementalDecoder(PREFIX, at_start=False), chunks) == expected
    assert push_all(IncrementalDecoder(PREFIX), chunks) == expected.removeprefix(" ")
    assert PREFIX.decode(ids) == expected.removeprefix(" ")


@given(st.text(alphabet="ab é😀", max_size=20))
def test_valid_text_decodes_as_the_tokenizers_library_does(text):
    for tokenizer in (BYTES, PREFIX):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == text


def test_special_tokens_are_left_out_or_shown():
    ids = [ord("a"), SPECIAL, ord("b")]
    assert IncrementalDecoder(BYTES).push(ids) == "ab"
    assert IncrementalDecoder(BYTES, skip_special_tokens=False).push(ids) == "a<end>b"
    # The prefix space goes although a skipped token comes first.
    assert IncrementalDecoder(PREFIX).push([1, 4, 5]) == "ab"
    assert IncrementalDecoder(PREFIX, skip_special_tokens=False).push([1, 4, 5]) == "<s> ab"


@given(st.lists(tricky_bytes | st.just(SPECIAL), max_size=20))
def test_num_tokens_is_the_shortest_prefix_that_holds_the_text(ids):
    decoder = IncrementalDecoder(BYTES)
    text = push_all(decoder, [ids])
    # Characters complete after n tokens, from scratch for each n.
    complete = [len(IncrementalDecoder(BYTES).push(ids[:n])) for n in range(len(ids) + 1)]
    assert decoder.text_lengths == complete[1:]
    for num_chars in range(len(text) + 1):
        reached = [n for n, length in enumerate(complete) if length >= num_chars]
        assert decoder.num_tokens(num_chars) == (reached[0] if reached else len(ids))
    for num_chars in (-1, len(text) + 1):
        with pytest.raises(ValueError, match=f"num_chars={num_chars}: must be in 0..{len(text)}"):
            decoder.num_tokens(num_chars)


def first_stop(text, stop):
    """(end, the longest stop string that ends there) for the first character where one ends."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(
    chunked(st.sampled_from("ab")),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
def test_stop_strings_end_the_text_however_it_is_cut(chunks, stop, include):
    pieces = ["".join(chunk) for chunk in chunks]
    text = "".join(pieces)
    expected = first_stop(text, stop)
    matcher = StopStringMatcher(stop, include)
    shown = ""
    for i, piece in enumerate(pieces):
        output = matcher.push(piece)
        shown += output.text
        assert output.num_chars == len(shown)
        if output.stop is not None:
            assert expected is not None
            end, string = expected
            assert output.stop == string
            assert shown == text[: end if include else end - len(string)]
            assert matcher.flush() == ""
            return
        # What is held back is no more than a beginning of a stop string, and none of it is out.
        arrived = "".join(pieces[: i + 1])
        held = arrived[len(shown) :]
        assert arrived.startswith(shown)
        assert held == "" or any(s.startswith(held) and s != held for s in stop)
    assert expected is None
    assert shown + matcher.flush() == text


def test_a_stop_string_over_several_tokens_leaks_nothing():
    matcher = StopStringMatcher(["ha ha"])
    outputs = [matcher.push(piece) for piece in ("so ", "h", "a", " h", "e ha", " ", "ha!")]
    assert [output.text for output in outputs] == ["so ", "", "", "", "ha he ", "", ""]
    assert outputs[-1].stop == "ha ha" and outputs[-1].num_chars == len("so ha he ")


def test_the_stop_string_that_is_complete_first_wins():
    assert StopStringMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc", 1)
    assert StopStringMatcher(["b", "ab"]).push("xab") == ("x", "ab", 1)
    assert StopStringMatcher(["b", "ab"], include_stop_str_in_output=True).push("xabc")[0] == "xab"


def test_a_stop_string_cuts_text_and_tokens_together():
    # "no no" over tokens " n" "o" .. : the text ends before it and so do the ids.
    ids = [*b"yes", 257, ord(" "), ord("n"), ord("o"), ord("!")]
    decoder, matcher = IncrementalDecoder(BYTES), StopStringMatcher(["no no"])
    shown = ""
    for token_id in ids:
        output = matcher.push(decoder.push([token_id]))
        shown += output.text
        if output.stop is not None:
            break
    assert shown == "yes "
    kept = ids[: decoder.num_tokens(output.num_chars)]
    # The token " no" gave the space that stays, so it stays.
    assert kept == [*b"yes", 257] and BYTES.decode(kept).startswith(shown)


def test_stop_at_the_very_beginning_keeps_no_token():
    decoder, matcher = IncrementalDecoder(BYTES), StopStringMatcher(["a"])
    output = matcher.push(decoder.push([ord("a")]))
    assert output == ("", "a", 0) and decoder.num_tokens(output.num_chars) == 0


def test_bad_stop_strings_are_named():
    with pytest.raises(ValueError, match=r"stop\[1\]=''"):
        StopStringMatcher(["a", ""])
    with pytest.raises(ValueError, match=r"stop='a'.*\['a'\]"):
        StopStringMatcher("a")


def test_without_stop_strings_nothing_is_held_back():
    matcher = StopStringMatcher()
    assert matcher.push("abc") == ("abc", None, 3) and matcher.flush() == ""
