"""Does `helios distill` make a draft that serves, and does it end with the same bits if killed?"""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoints_conv import open_checkpoint, read_params
from helios_jax import distill
from helios_jax.cli.main import main
from helios_jax.distill.acceptance import Prompt, run_prompts
from helios_jax.model.forms import serving_form
from helios_jax.speculative.pairing import named_target, params_fingerprint
from helios_jax.speculative_config import load_speculation
from helios_jax.tokenizer import Tokenizer
from tests import tiny

OPTIONS = [
    "--num-sequences", "12", "--max-tokens", "16", "--max-model-len", "64", "--top-k", "8",
    "--dtype", "float32", "--train-dtype", "float32", "--tokens-per-batch", "256",
    "--warmup", "2", "--bits", "16",
]  # fmt: skip
SHAPE = ("--layers", "0", "--vocab-tokens", "96")
NUM_KILLS = 20


def arguments(target: Path, prompts: Path, out: Path, *more: str, shape=SHAPE) -> list[str]:
    return ["distill", "--target", str(target), "--prompts", str(prompts), "--out", str(out),
            *OPTIONS, *shape, *more]  # fmt: skip


def helios(*given: str) -> None:
    """Runs the verb in this process."""
    try:
        main(list(given))
    except SystemExit as ended:
        assert ended.code in (0, None)


@pytest.fixture(scope="module")
def draft(target, prompts_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("drafts") / "draft"
    helios(*arguments(target, prompts_file, out, "--steps", "8", "--evaluate-every", "4"))
    return out


def test_the_draft_names_its_target_and_how_it_was_made(target, draft):
    manifest = json.loads((draft / "manifest.json").read_text())
    theirs = json.loads((target / "manifest.json").read_text())
    assert named_target(manifest) == params_fingerprint(theirs)
    source = manifest["source"]
    assert source["sampling"]["num_sequences"] == 12
    assert source["training"]["optimizer"]["num_steps"] == 8
    assert source["shape"]["pruned"]["layers"] == [0]
    assert source["num_sampled_tokens"] > 12 and 0 < source["held_out_acceptance"] <= 1
    assert source["circumstances"]["versions"]["jax"]
    vocabulary = open_checkpoint(draft).draft_vocabulary
    assert vocabulary is not None and len(vocabulary.ids_U) == 96


def test_it_drafts_for_its_target_and_changes_no_token(target, draft):
    checkpoint = open_checkpoint(target)
    form = serving_form(checkpoint.config, read_params(checkpoint), "float32")
    config = {"model": str(draft), "num_speculative_tokens": 3, "controller": "fixed"}
    speculation, extra = load_speculation(config, target, checkpoint.tokenizer, "float32")
    prompts = [Prompt("all", checkpoint.tokenizer.encode(text)) for text in ("a prompt c", "so")]
    counts = run_prompts(
        (form.model, form.params), speculation, extra, prompts, [0.0], max_tokens=12, num_rows=2,
        kv_dtype="float32",
    )  # fmt: skip
    assert sum(found.num_proposed for found in counts) > 0
    for found in counts:
        logits = np.asarray(form.model.apply(form.params, np.array([found.tokens])))[0]
        greedy = logits.argmax(axis=1)[found.num_prompt - 1 : -1]
        np.testing.assert_array_equal(found.tokens[found.num_prompt :], greedy)


def test_an_old_draft_is_paired_again(target, prompts_file, draft, tmp_path, capsys):
    out = tmp_path / "again"
    more = ("--steps", "8", "--evaluate-every", "4")
    helios(*arguments(target, prompts_file, out, *more, shape=("--init", str(draft))))
    old, new = open_checkpoint(draft), open_checkpoint(out)
    assert old.draft_vocabulary is not None and new.draft_vocabulary is not None
    assert np.array_equal(old.draft_vocabulary.ids_U, new.draft_vocabulary.ids_U)
    assert new.describe_source()["init"] == str(draft) and new.config == old.config
    assert "acceptance" in capsys.readouterr().err


@pytest.mark.parametrize(
    "shape, message",
    [
        (["--layers", "7"], "layers=\\(7,\\): must be one or more of 0..1"),
        (["--layers", "one"], "must be the target's layers"),
        (["--layers", "0", "--hidden-size", "99"], "hidden_size=99: must be in 1..32"),
        (["--layers", "0", "--vocab-tokens", "9999"], "vocab_tokens=9999: a draft's vocabulary"),
        (["--layers", "0", "--vocab-tokens", "0"], "vocab_tokens=0: a draft's vocabulary"),
        (["--layers", "0", "--bits", "5"], "bits=5: must be 8, 4 or 16"),
        (["--layers", "0", "--bits", "3"], "bits=3: must be 8, 4 or 16"),
        (["--layers", "0", "--loss", "kl=1"], "names are forward_kl"),
        (["--layers", "0", "--loss", "forward_kl=much"], "must be NAME=WEIGHT"),
        (["--layers", "0", "--plot", "none/a.png"], "its folder must exist"),
        (["--layers", "0", "--init", "x"], "layers=0: an old draft has its shape already"),
        (["--init", "x", "--hidden-size", "9"], "hidden_size=9: an old draft has its shape"),
        (["--init", "none-of-that-name"], "none-of-that-name"),
        (["--draft-config", "{"], "is not JSON"),
        (["--draft-config", '{"num_layer": 1}'], "num_layer"),
        (["--draft-config", '{"vocab_size": 9}'], "vocab_size=9: a draft's tokens"),
        (
            ["--draft-config", '{"num_layers": 1}', "--hidden-size", "16"],
            "hidden_size=16: are of a pruned target",
        ),
        (
            ["--draft-config", '{"num_layers": 1}', "--layers", "0"],
            "one of them says what the draft is",
        ),
        ([], "one of them says what the draft is"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_sampled(
    target, prompts_file, tmp_path, monkeypatch, capsys, shape, message
):
    def load_target(*args, **kwargs):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(distill, "load_target", load_target)
    with pytest.raises(SystemExit) as ended:
        main(arguments(target, prompts_file, tmp_path / "refused", shape=shape))
    assert ended.value.code == 2 and not [*tmp_path.iterdir()]
    assert re.search(message, capsys.readouterr().err)


def test_an_old_draft_of_other_tokens_is_refused(target):
    backend = tiny.tokenizer().backend
    backend.add_special_tokens(["<more>"])
    with pytest.raises(ValueError, match="its tokenizer is not the target's"):
        distill.read_draft(target, Tokenizer(backend, bos_token_id=256, eos_token_ids=(257,)))


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(target, prompts_file, tmp_path):
    """SIGKILL during sampling and training, at moments of a seed that is printed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    command = [sys.executable, "-m", "helios_jax.cli.main"]
    more = ["--steps", "40", "--evaluate-every", "5", "--on-policy", "0.2"]

    def start(name: str) -> subprocess.Popen:
        given = arguments(target, prompts_file, tmp_path / name, *more)
        return subprocess.Popen([*command, *given], stderr=subprocess.PIPE, text=True)

    def finish(name: str) -> float:
        started = time.monotonic()
        process = start(name)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return time.monotonic() - started

    finish("whole")
    # Compiled programs are kept: the second time is that of the ones that are killed.
    seconds = finish("again")
    num_killed, names = 0, []
    while num_killed < NUM_KILLS:
        names.append(f"resumed_{len(names)}")
        while num_killed < NUM_KILLS and not (tmp_path / names[-1]).exists():
            process = start(names[-1])
            time.sleep(seconds * draw.uniform(0.2, 0.9))
            num_killed += process.poll() is None
            process.kill()
            process.communicate()
        assert len(names) <= NUM_KILLS, f"seed {seed}: too fast to be killed"
    print(f"{len(names)} runs, killed {num_killed} times")
    if not (tmp_path / names[-1]).exists():
        finish(names[-1])

    def made(name: str) -> tuple[str, str, list[str]]:
        work = tmp_path / f".{name}.distilling"
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        shards = sorted(path.name for path in work.rglob("shard_*.npz"))
        [metrics] = work.glob("training/*/metrics.jsonl")
        return manifest["leaves"], metrics.read_text(), shards

    assert made("whole") == made("again"), f"seed {seed}"
    for name in names:
        assert made("whole") == made(name), f"seed {seed}, {name}"
