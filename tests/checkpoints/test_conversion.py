"""Does a conversion leave all of its result or nothing, whatever ends it?"""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints_conv import convert, converting, disk, native, open_checkpoint
from checkpoints_conv.command import run_convert
from tests.checkpoints.tiny_checkpoints import random_weights, tiny_config, write_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    config = tiny_config()
    return write_gguf(tmp_path / "m.gguf", config, random_weights(config))


@pytest.fixture
def target(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model"


def run(*arguments, **options):
    """`python -m checkpoints_conv` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "checkpoints_conv", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_progress_ends_at_the_total(source, target):
    seen = []
    convert(source, target, lambda done, total: seen.append((done, total)))
    nbytes = open_checkpoint(source).nbytes
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {nbytes}
    assert seen[-1] == (nbytes, nbytes)
    assert os.listdir(target.parent) == ["model"]


def test_target_folder_and_its_parents_are_made(source, tmp_path):
    convert(str(source), str(tmp_path / "a" / "b" / "model"))
    assert open_checkpoint(tmp_path / "a" / "b" / "model").format == "native"
    mode = (tmp_path / "a" / "b" / "model").stat().st_mode
    assert mode == (tmp_path / "a" / "b").stat().st_mode


def test_what_is_there_is_not_overwritten(source, target):
    convert(source, target)
    before = (target / "manifest.json").stat().st_ino
    with pytest.raises(ValueError, match=r"model: exists already"):
        convert(source, target)
    assert (target / "manifest.json").stat().st_ino == before
    convert(source, target, overwrite=True)
    assert (target / "manifest.json").stat().st_ino != before
    assert os.listdir(target.parent) == ["model"]
    convert(target, target, overwrite=True)
    assert open_checkpoint(target).num_tensors == 21


def test_only_native_checkpoints_are_overwritten(source, target):
    target.mkdir()
    (target / "diary.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"is not a native checkpoint, and only those"):
        convert(source, target, overwrite=True)
    assert (target / "diary.txt").read_text() == "dear"


def test_a_source_that_cannot_be_read_leaves_nothing(source, target):
    source.write_bytes(source.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"truncated: tensor"):
        convert(source, target)
    assert os.listdir(target.parent) == []


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("a defect"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_in_the_middle_leaves_nothing(source, target, error, overwrite):
    if overwrite:
        convert(source, target)
    before = sorted(target.rglob("*"))

    def fail(done, total):
        if done > total / 2:
            assert len(os.listdir(target.parent)) == 1 + overwrite
            raise error

    with pytest.raises(type(error)):
        convert(source, target, fail, overwrite)
    assert os.listdir(target.parent) == ["model"] * overwrite
    assert sorted(target.rglob("*")) == before


@pytest.mark.parametrize("step", ["flush_folder", "_move_into_place"])
def test_an_error_at_the_end_leaves_nothing(source, target, monkeypatch, step):
    def fail(*_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(converting, step, fail)
    with pytest.raises(OSError, match="input/output error"):
        convert(source, target)
    assert os.listdir(target.parent) == []


def test_failed_replacement_keeps_the_old_one(source, target, monkeypatch):
    convert(source, target)
    rename = Path.rename

    def fail(path, to):
        if ".partial-" in path.name and not path.name.endswith("-replaced"):
            raise OSError(errno.EIO, "input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="input/output error"):
        convert(source, target, overwrite=True)
    assert os.listdir(target.parent) == ["model"]
    assert open_checkpoint(target).num_tensors == 21


@pytest.mark.parametrize("free", [1000, disk._SPARE_BYTES + 50_000])
def test_full_disk_is_noticed_before_writing(source, target, monkeypatch, free, capsys):
    """Before anything is written; and before a layer, should others have filled the disk."""
    usage = disk.shutil.disk_usage(target.parent)._replace(free=free)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)
    if free > disk._SPARE_BYTES:
        monkeypatch.setattr(converting, "require_space", lambda folder, num_bytes: None)
    assert run_convert(str(source), str(target)) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert os.listdir(target.parent) == []


def test_full_disk_within_orbax(source, target, monkeypatch):
    """The file system's own error, as TensorStore words it."""
    monkeypatch.setattr(native, "_SETTLE_SECONDS", 0)
    text = f"RESOURCE_EXHAUSTED: Failed to write: {os.strerror(errno.ENOSPC)} [os_error_code='28']"

    def save(*_, **__):
        raise ValueError(text)

    import orbax.checkpoint

    monkeypatch.setattr(orbax.checkpoint.PyTreeCheckpointer, "save", save)
    with pytest.raises(OSError, match="the disk is full") as error:
        convert(source, target)
    assert error.value.errno == errno.ENOSPC
    assert os.listdir(target.parent) == []


def test_writes_that_the_system_refuses(source, target):
    """A file size limit makes real writes fail in TensorStore's threads."""
    code = (
        "import resource, sys\n"
        "from checkpoints_conv.command import run_convert\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "sys.exit(run_convert(*sys.argv[1:]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, source, target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "cannot be written" in ended.stderr and "Traceback" not in ended.stderr
    assert os.listdir(target.parent) == []


def start_and_wait_for_partial(source, target):
    """A conversion that is slow on purpose, once it has begun to write."""
    code = (
        "import sys, time\n"
        "from checkpoints_conv import native\n"
        "from checkpoints_conv.command import run_convert\n"
        "save = native._save_group\n"
        "def slow(folder, tree):\n"
        "    save(folder, tree)\n"
        "    time.sleep(60 if folder.name == 'layers_0' else 0)\n"
        "native._save_group = slow\n"
        "sys.exit(run_convert(*sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, source, target],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(target.parent.glob(".model.partial-*/params/layers_0/_METADATA")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_interrupt(source, target):
    process = start_and_wait_for_partial(source, target)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted: nothing was written\n")
    assert os.listdir(target.parent) == []


def test_killed_process(source, target):
    """The next conversion to the same target cleans up, but not under one that still runs."""
    process = start_and_wait_for_partial(source, target)
    (partial,) = os.listdir(target.parent)
    convert(source, target)
    assert sorted(os.listdir(target.parent)) == sorted([partial, "model"])
    process.kill()
    process.communicate(timeout=60)
    other = target.with_name("other")
    convert(source, other)
    assert sorted(os.listdir(target.parent)) == sorted([partial, "model", "other"])
    convert(source, target, overwrite=True)
    assert sorted(os.listdir(target.parent)) == ["model", "other"]


def test_command_line(source, target):
    ended = run(source, target)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"wrote {target}\n", "")
    assert open_checkpoint(target).config == tiny_config()
    assert run("--help").stdout.startswith("usage: python -m checkpoints_conv")
    assert run(source).returncode == 2


def test_command_errors(source, target, capsys):
    (source.parent / "config.json").write_text("{}")
    assert run_convert(str(source.parent), str(target)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and "model_type" in captured.err
    assert captured.err.count("\n") == 1
    assert run_convert(str(source.parent), str(target), debug=True) == 1
    assert "Traceback" in capsys.readouterr().err
    unwritable = source / "below a file"
    assert run_convert(str(source), str(unwritable)) == 1
    assert "error: " in capsys.readouterr().err
