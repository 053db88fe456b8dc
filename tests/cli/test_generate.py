"""Does `helios generate` ask the model what was meant, and print what came?"""

import json
import math

import numpy as np
import pytest

from helios_jax.cli.generate import to_json


def test_text_on_stdout_statistics_on_stderr(llm, helios):
    code, out, err = helios("generate", "Hi")
    assert (code, out) == (0, "Hello, wörld!\n")
    assert llm.prompts == ["<user>Hi"]
    assert err.startswith("[fake weights; prompt 8 tokens, first token ") and err.count("\n") == 1
    assert "; 2 tokens, " in err and err.endswith(" tokens/s]\n")
    assert llm.loaded == (
        "smollm2-135m",
        dict(dtype="auto", max_model_len=None, kv_cache_dtype="auto", kv_watermark=4000),
    )


def test_defaults_are_reproducible(llm, helios):
    helios("generate", "Hi")
    assert (llm.params.temperature, llm.params.max_tokens, llm.params.n) == (0.0, 256, 1)


def test_every_option_arrives(llm, helios):
    code, _, err = helios(
        *"generate Hi -m m.gguf --dtype int8 --max-model-len 99 --kv-cache-dtype fp8_e4m3 "
        "--kv-watermark 0 --max-tokens 7 --min-tokens 2 "
        "--temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.05 --seed 3 --stop a --stop b "
        "--ignore-eos --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty "
        "0.3".split()
    )
    assert code == 0, err
    params = llm.params
    assert llm.loaded == (
        "m.gguf", dict(dtype="int8", max_model_len=99, kv_cache_dtype="fp8_e4m3", kv_watermark=0)
    )  # fmt: skip
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 2, 3)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert tuple(params.stop) == ("a", "b") and params.ignore_eos
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, 0.2)
    assert params.frequency_penalty == 0.3


@pytest.mark.parametrize("verb", ["generate Hi", "chat"])
@pytest.mark.parametrize(
    "option, config",
    [
        ("--prompt-lookup=5", {"method": "ngram", "num_speculative_tokens": 5}),
        ("--draft=small", {"model": "small"}),
        ('--speculative-config={"model":"m"}', {"model": "m"}),
    ],
)
def test_who_drafts(llm, helios, verb, option, config):
    code, _, err = helios(*verb.split(), option)
    assert code == 0, err
    assert llm.loaded[1]["speculative_config"] == config


def test_raw_and_models_without_a_template(llm, helios):
    helios("generate", "Hi", "--raw")
    llm.tokenizer.chat_template = None
    helios("generate", "Hi")
    assert llm.prompts == ["Hi", "Hi"]


def test_system_message(llm, helios):
    helios("generate", "Hi", "--system", "Be brief.")
    assert llm.prompts == ["<system>Be brief.<user>Hi"]
    code, _, err = helios("generate", "Hi", "--system", "Be brief.", "--raw")
    assert code == 2 and "needs a chat template" in err


def test_prompt_from_standard_input(llm, helios):
    helios("generate", "-", "--raw", input="two\nlínes\n\n".encode())
    assert llm.prompts == ["two\nlínes\n"]
    code, _, err = helios("generate", "-", input=b"\xff")
    assert code == 2 and "must be UTF-8" in err


def test_json(llm, helios):
    code, out, err = helios("generate", "Hi", "--json", "--logprobs", "2")
    assert code == 0 and out.count("\n") == 1 and err == ""
    parsed = json.loads(out)
    assert parsed["prompt"] == "<user>Hi"
    [completion] = parsed["outputs"]
    assert completion["text"] == "Hello, wörld!" and completion["token_ids"] == [1, 2]
    assert llm.params.logprobs == 2


def test_json_of_numbers_that_json_lacks():
    value = {3: (np.float32(0.5), -math.inf, math.nan), "ids": np.arange(2), "none": None}
    assert to_json(value) == {"3": [0.5, None, None], "ids": [0, 1], "none": None}


def test_several_answers(llm, helios):
    code, out, _ = helios("generate", "Hi", "--n", "2", "--temperature", "1")
    assert code == 0 and out == "--- 0\nHello, wörld!\n--- 1\nHello, wörld!\n"


def test_an_answer_that_was_cut_says_so(llm, helios):
    llm.answer, llm.finish_reason = "Hello,", "length"
    _, _, err = helios("generate", "Hi", "--max-tokens", "1")
    assert "; 1 tokens (cut at --max-tokens 1)]" in err
    assert helios("generate", "Hi", "--no-stats")[2] == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["", "--chat"], "prompt='': must not be empty"),
        (["Hi", "--top-p", "0"], "top_p="),
        (["Hi", "--top-p", "2"], "top_p="),
        (["Hi", "--temperature", "nan"], "temperature="),
        (["Hi", "--temperature", "-1"], "temperature="),
        (["Hi", "--max-tokens", "0"], "max_tokens="),
        (["Hi", "--max-tokens", "-5"], "max_tokens="),
        (["Hi", "--max-tokens", "many"], "'--max-tokens'"),
        (["Hi", "--n", "2"], "n=2"),
        (["Hi", "--prompt-lookup", "4", "--draft", "d"], "leave the others out"),
        (["Hi", "--speculative-config", "{"], "is not JSON"),
        (["Hi", "--speculative-config", "4"], "must be a JSON object"),
        (["Hi", "--logprobs", "2"], "add --json"),
        (["Hi", "--no-such-option"], "--no-such-option"),
        ([], "Missing argument 'prompt'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(llm, helios, arguments, message):
    code, out, err = helios("generate", *arguments)
    assert (code, out) == (2, "") and message in err
    assert "Traceback" not in err
    assert llm.prompts == []
