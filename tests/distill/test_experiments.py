"""Do the commands that measure a draft run from files to tables?"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helios_jax.cli.main import main as helios
from helios_jax.distill import acceptance_command, pairing_experiment, shapes, speed
from tests.distill.conftest import changed, target_params, write_model
from tests.tiny import config

# Groups of 64 are what the experiment quantises in.
CONFIG = changed(config(max_model_len=256), hidden_size=64)
SHORT = ["--num-sequences", "12", "--max-tokens", "12", "--max-model-len", "64"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """target/, draft/, and prompts of two categories."""
    folder = tmp_path_factory.mktemp("experiments")
    write_model(folder / "target", CONFIG, target_params(CONFIG))
    lines = [{"prompt": f"a prompt {i}", "category": "xy"[i % 2]} for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SystemExit) as ended:
        helios([
            "distill", "--target", str(folder / "target"), "--out", str(folder / "draft"),
            "--prompts", str(folder / "prompts.jsonl"), *SHORT, "--layers", "0",
            "--vocab-tokens", "96", "--steps", "2", "--warmup", "1", "--tokens-per-batch", "128",
        ])  # fmt: skip
    assert ended.value.code in (0, None)
    return folder


def run(monkeypatch, module, folder: Path, *options: str) -> dict:
    """What the command writes: JSON, and a table beside it."""
    out = folder / f"{module.__name__}.json"
    arguments = ["--target", str(folder / "target"), *options, "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()
    assert out.with_suffix(".md").read_text().startswith(("|", "Passes"))
    return json.loads(out.read_text())


def test_acceptance_beside_the_baselines(monkeypatch, folder):
    found = run(
        monkeypatch, acceptance_command, folder, "--draft", str(folder / "draft"), "--untrained",
        "--lookup", "--bigram", str(folder / ".draft.distilling" / "samples"),
        "--prompts", str(folder / "prompts.jsonl"), "--temperature", "0", "--max-tokens", "8",
    )  # fmt: skip
    names = [row["proposer"] for row in found["rows"]]
    assert names == ["draft", "untrained", "prompt lookup", "bigram table"]
    assert all(set(row["by_category"]) == {"x", "y"} for row in found["rows"])


def test_the_command_is_called_by_what_it_measures():
    done = subprocess.run(
        [sys.executable, "-m", "helios_jax.distill.acceptance", "--help"], capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "--lookup" in done.stdout, done.stderr


def test_the_pairing_experiment_has_a_row_before_and_after(monkeypatch, folder):
    found = run(
        monkeypatch, pairing_experiment, folder, "--draft", str(folder / "draft"),
        "--prompts", str(folder / "prompts.jsonl"), "--work", str(folder / "work"),
        "--training-prompts", str(folder / "prompts.jsonl"), "--bits", "4", "--temperature", "0",
        "--max-tokens", "8", "--num-sequences", "6", "--steps", "2",
    )  # fmt: skip
    assert [row["proposer"] for row in found["rows"]] == [
        "float draft on the float target", "float draft on 4 bits", "draft re-paired on 4 bits",
    ]  # fmt: skip
    assert json.loads((folder / "work" / "target_4" / "manifest.json").read_text())["leaves"]


def test_speed_by_category(monkeypatch, folder):
    found = run(
        monkeypatch, speed, folder, "--draft", str(folder / "draft"), "--max-tokens", "8",
        "--prompts", str(folder / "prompts.jsonl"), "--num-draft-tokens", "2",
        "--per-category", "1",
    )  # fmt: skip
    speeds = found["tokens_per_second"]
    assert [*speeds] == ["plain, int8", "plain, bfloat16", "prompt lookup", "draft, 2 tokens"]
    assert all(min(x) > 0 for by_category in speeds.values() for x in by_category.values())
    assert set(found["predicted_speed_up"]) == {"draft, 2 tokens, H100", "draft, 2 tokens, H200"}


def test_what_shapes_cost(monkeypatch, folder):
    found = run(monkeypatch, shapes, folder, "--shape", "0", "96", "32")
    assert [row["shape"] for row in found["rows"]] == ["0; 96; 32"]
    assert len(found["verify_seconds"]) == 5 and found["rows"][0]["draft_seconds"] > 0
