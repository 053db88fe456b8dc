"""The whole way on a CPU: quantise, pair a draft, serve, stream over gRPC, replay the recording."""

import json
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import helios_jax
from helios_jax.cli.main import main
from helios_jax.engine import read_recording, replay
from helios_jax.server.client import Client
from helios_jax.speculative.pairing import TARGET_FINGERPRINT, params_fingerprint
from tests.quantise.conftest import TEXT, make_checkpoint
from tests.server.processes import Process

SIZES = dict(hidden_size=64, intermediate_size=128, head_dim=16, max_model_len=256)


@pytest.fixture
def compiled(server_folder):
    """Programs are those that the server's process has compiled."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(server_folder / "xla"))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def helios(*arguments: object) -> None:
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    assert not exited.value.code


def paired_draft(folder, target) -> None:
    """A random model of one layer whose manifest names the target."""
    make_checkpoint(folder, **SIZES | dict(num_layers=1))
    target_manifest = json.loads((target / "manifest.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["source"][TARGET_FINGERPRINT] = params_fingerprint(target_manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("drafts", ["lookup", pytest.param("model", marks=pytest.mark.slow)])
def test_the_whole_mission(drafts, tmp_path, server_folder):
    make_checkpoint(tmp_path / "source", **SIZES)
    (tmp_path / "traffic.txt").write_text(TEXT * 40)
    target, draft, record = (tmp_path / name for name in ("target", "draft", "run.jsonl"))
    helios(
        "quantize", tmp_path / "source", "--method", "awq", "--bits", 4, "--group-size", 32,
        "--calibration", tmp_path / "traffic.txt", "--out", target,
    )  # fmt: skip
    if drafts == "model":
        paired_draft(draft, target)
        speculation = {"model": str(draft), "num_speculative_tokens": 1}
    else:
        # Of any byte that was there before, so that something is drafted.
        speculation = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1}
    # One at a time: half as many programs.
    options = {"kv_cache_dtype": "fp8_e4m3", "kv_watermark": "inf", "max_num_seqs": 1}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    server = Process(
        server_folder,
        [
            "-m", "helios_jax.cli.main", "serve", str(target), "--port=0", "--metrics-port=0",
            "--log-format=json", "--no-warm-up", "--dtype=int4", f"--record={record}",
            f"--speculative-config={json.dumps(speculation)}", *flags,
        ],
    )  # fmt: skip
    try:
        with Client(server.address) as client, ThreadPoolExecutor() as threads:
            assert client.model_info().num_speculative_tokens == 1

            def stream(number: int) -> list:
                sampling = dict(max_tokens=20, ignore_eos=True, seed=number, temperature=number / 2)
                return list(client.stream(f"The quick brown {number}", timeout=120, **sampling))

            streams = list(threads.map(stream, range(3)))
        outcomes = [parts[-1].request_output for parts in streams]
        assert all(outcome.acceptance.num_draft_tokens > 0 for outcome in outcomes)
        counted = server.metrics()
        for name in ("draft", "accepted"):
            total = sum(getattr(o.acceptance, f"num_{name}_tokens") for o in outcomes)
            label = f"helios:spec_decode_num_{name}_tokens_total"
            assert next(v for k, v in counted.items() if k.startswith(label)) == total
    finally:
        assert server.stop() == 0

    llm = helios_jax.load(
        str(target), dtype="int4", speculative_config=speculation,
        **options | {"kv_watermark": float("inf")},
    )  # fmt: skip
    arrived = [
        request
        for _, fields in read_recording(record).lines
        for request in fields.get("requests", ())
    ]
    again: dict[int, list[int]] = {}
    for step in replay(
        record, llm.engine.form, llm.tokenizer, model_config=llm.config,
        speculation=llm.engine.step_config.speculation,
        speculation_params=llm.engine.speculation_params,
    ):  # fmt: skip
        for rows in (step.chunk, step.rounds):
            for i, row_id in enumerate([] if rows is None else rows.request_id_B):
                if row_id >= 0:
                    drawn = rows.tokens_BN[i]
                    again.setdefault(int(row_id), []).extend(drawn[drawn >= 0].tolist())
    for number, outcome in enumerate(outcomes):
        ids = llm.tokenizer.encode(f"The quick brown {number}")
        (request,) = [each for each in arrived if each["prompt_token_ids"] == ids]
        assert again[request["request_id"]] == outcome.outputs[0].token_ids
