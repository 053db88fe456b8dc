"""Are calibration tokens drawn as asked, the same ones each time, and never the held-out ones?"""

import json

import numpy as np
import pytest

from helios_jax.calibrate import load_calibration
from helios_jax.calibrate.data import conversation_of, read_objects
from tests import tiny


def write_requests(path, prompts) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def load(paths, **options):
    fields = dict(num_sequences=4, sequence_length=32, held_out=0.2, seed=0)
    return load_calibration(paths, tiny.tokenizer(), **(fields | options))


def test_text_is_cut_into_windows_of_which_some_are_held_out(text_file):
    drawn = load([text_file])
    assert drawn.tokens_BT.shape == (4, 32) and drawn.tokens_BT.dtype == np.int32
    whole = tiny.tokenizer().encode(text_file.read_text())
    windows = {tuple(whole[i : i + 32]) for i in range(0, len(whole), 32)}
    used = set(map(tuple, drawn.tokens_BT.tolist()))
    kept = set(map(tuple, drawn.held_out))
    assert used < windows and kept < windows and not used & kept
    assert len(kept) == int(np.ceil(0.2 * len(windows)))


def test_the_seed_decides(text_file):
    first, again, other = load([text_file]), load([text_file]), load([text_file], seed=1)
    np.testing.assert_array_equal(first.tokens_BT, again.tokens_BT)
    assert first.held_out == again.held_out
    assert not np.array_equal(first.tokens_BT, other.tokens_BT)


def test_requests_are_packed_and_equal_ones_stay_together(tmp_path):
    """20 different requests, each three times: none may be on both sides of the split."""
    path = tmp_path / "traffic.jsonl"
    write_requests(path, [f"request number {i % 20}!" for i in range(60)])
    drawn = load([path], num_sequences=100, held_out=0.3)
    assert len(drawn.held_out) == 6
    stream = drawn.tokens_BT.reshape(-1).tolist()
    text = tiny.tokenizer().decode(stream)
    held_out = [tiny.tokenizer().decode(unit) for unit in drawn.held_out]
    assert all(request not in text for request in held_out)
    assert len({request for request in text.split("!") if len(request) > 15}) >= 11


def test_messages_go_through_the_chat_template(tmp_path):
    path = tmp_path / "traffic.jsonl"
    asked = {"role": "user", "content": "Hi"}
    answered = [asked, {"role": "assistant", "content": "Hello"}]
    lines = [{"messages": [asked]}, {"messages": answered}]
    path.write_text("\n".join(map(json.dumps, lines)))
    drawn = load([path], num_sequences=1, sequence_length=8, held_out=0.5)
    units = [drawn.tokens_BT.reshape(-1).tolist(), *drawn.held_out]
    texts = [tiny.tokenizer().decode(unit) for unit in units]
    assert any(text == "<|user|>Hi\n<|assistant|>" or text == "<|user|>" for text in texts)
    assert "<|user|>Hi\n<|assistant|>Hello\n" in texts or "<|user|>" in texts


def test_objects_are_read_with_their_places(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n\n{"other": 1}\n')
    assert read_objects(path) == [(f"{path}:1", {"prompt": "x"}), (f"{path}:3", {"other": 1})]
    path.write_text('\n{"prompt"')
    with pytest.raises(ValueError, match="a.jsonl:2: is not JSON"):
        read_objects(path)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"prompt": "x", "category": "y"}, {"prompt": "x"}),
        ({"messages": [1], "prompt": "x"}, {"messages": [1]}),
        ({"turns": ["a", "b"]}, {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_what_a_line_asks(fields, expected):
    assert conversation_of("here", fields) == expected


@pytest.mark.parametrize("fields", [{}, {"prompt": 1}, {"turns": []}, {"messages": "x"}])
def test_a_line_that_asks_nothing_is_named(fields):
    with pytest.raises(ValueError, match="here: must have `prompt`"):
        conversation_of("here", fields)


def test_nothing_is_held_out_when_asked_so(text_file):
    assert load([text_file], held_out=0).held_out == []


@pytest.mark.parametrize(
    "name, content, options, message",
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt"', {}, "a.jsonl:2: is not JSON"),
        ("a.jsonl", "[1]", {}, "a.jsonl:1: must be a JSON object"),
        ("a.jsonl", '{"text": "x"}', {}, "a.jsonl:1: must have `prompt` (text), `mess"),
        ("a.jsonl", '{"messages": [3]}', {}, "a.jsonl:1: messages cannot be rendered"),
        ("a.txt", "", {}, "a.txt: holds no text"),
        ("a.txt", "short", {}, "holds 5 tokens beside the held-out ones: one sequence takes 32"),
        ("a.txt", "x" * 99, {"num_sequences": 0}, "num_sequences=0: must be at least 1"),
        ("a.txt", "x" * 99, {"held_out": 1.0}, "held_out=1.0: must be at least 0 and less than 1"),
        ("a.txt", "x" * 99, {"sequence_length": 1}, "sequence_length=1: must be at least 2"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, name, content, options, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as raised:
        load([tmp_path / name], **options)
    assert message in str(raised.value)


def test_a_missing_or_binary_file_is_named(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.txt", "b.txt"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read as UTF-8 text"):
            load([tmp_path / name])
