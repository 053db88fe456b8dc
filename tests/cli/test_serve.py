"""Does `helios serve` load and configure what was meant?"""

from pathlib import Path

import pytest

from helios_jax.server import run
from helios_jax.server.config import ServerConfig
from helios_jax.server.proto import proto_text


@pytest.fixture
def served(monkeypatch, llm):
    """(config, loaded) of each server that would have run."""
    found = []
    monkeypatch.setattr(run, "run_server", lambda config, load: found.append((config, load())))
    monkeypatch.setattr("helios_jax.server.telemetry.log_to_stderr", lambda log_format: None)
    return found


def test_the_proto_is_printed(helios):
    code, out, _ = helios("serve", "--print-proto")
    assert (code, out) == (0, proto_text())
    assert "service Inference {" in out and "package helios.v1;" in out


def test_defaults_stay_on_this_machine(served, llm, helios):
    code, _, err = helios("serve")
    assert code == 0, err
    ((config, _),) = served
    assert config == ServerConfig(model_name="smollm2-135m")
    assert config.address == "127.0.0.1:50051" and not config.is_open
    assert llm.loaded[1]["max_num_seqs"] == 8


def test_every_option_arrives(served, llm, helios):
    code, _, err = helios(
        *"serve m.gguf --host :: --port 1 --tls-cert c --tls-key k --tls-client-ca a "
        "--auth-token-file t --metrics-port 2 --max-requests-per-client 3 --max-message-bytes 5000 "
        "--grace-seconds 4 --write-timeout-seconds 5 --no-warm-up --log-prompts --record r.jsonl "
        "--dtype int8 --max-model-len 99 --max-num-seqs 6 --max-num-rows 7 "
        "--max-num-batched-tokens 64 --kv-cache-dtype fp8_e4m3 --kv-watermark 0 "
        "--kv-cache-memory-bytes 1000 --gpu-memory-utilization 0.5 --prompt-lookup 3 --seed 9 "
        "--log-format json".split()
    )
    assert code == 0, err
    ((config, _),) = served
    assert config == ServerConfig(
        model_name="m.gguf", host="::", port=1, tls_cert=Path("c"), tls_key=Path("k"),
        tls_client_ca=Path("a"), auth_token_file=Path("t"), metrics_port=2,
        max_requests_per_client=3, max_message_bytes=5000, grace_seconds=4.0,
        write_timeout_seconds=5.0, warm_up=False, log_prompts=True, record=Path("r.jsonl"),
    )  # fmt: skip
    assert config.address == "[::]:1"
    assert llm.loaded == (
        "m.gguf",
        dict(
            dtype="int8", max_model_len=99, max_num_seqs=6, max_num_rows=7,
            max_num_batched_tokens=64, kv_cache_dtype="fp8_e4m3", kv_watermark=0,
            kv_cache_memory_bytes=1000, gpu_memory_utilization=0.5, seed=9,
            speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        ),
    )  # fmt: skip


def test_a_wrong_option_is_refused_before_anything_is_loaded(served, llm, helios):
    code, _, err = helios("serve", "--tls-cert", "c")
    assert code == 2 and "tls_cert='c', tls_key=None: must be given together" in err
    code, _, err = helios("serve", "--log-format", "xml")
    assert code == 2 and "log_format='xml': must be text or json" in err
    assert not served and llm.loaded is None
