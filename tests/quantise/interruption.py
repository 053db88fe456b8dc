"""Does `helios quantize` end with the same bits, however often it is killed?"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from checkpoints_conv import open_checkpoint
from tests.quantise.conftest import helios


def kill_and_resume(source: Path, options, folder: Path, num_kills: int, longest_wait: float):
    """Quantises `source` once in peace, and once with `num_kills` SIGKILLs; compares.

    A kill comes when a random number of files has appeared, and up to `longest_wait` seconds later.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    arguments = ["quantize", source, *options, "--out"]
    whole, resumed = folder / "whole", folder / "resumed"
    helios(*arguments, whole)
    work = folder / ".resumed.quantizing"
    command = [sys.executable, "-m", "helios_jax.cli.main", *map(str, arguments), str(resumed)]
    killed = 0
    for _ in range(num_kills):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
        )
        num_files = len([*work.glob("*")]) + rng.randrange(1, 4)
        while process.poll() is None and len([*work.glob("*")]) < num_files:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, longest_wait))
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed, f"seed {seed}"
    if not resumed.exists():
        helios(*arguments, resumed)
        assert not work.exists()
    found = [leaves_of(open_checkpoint(path)) for path in (whole, resumed)]
    assert equal(*found), f"seed {seed}"
    manifests = [(path / "manifest.json").read_text() for path in (whole, resumed)]
    assert manifests[0] == manifests[1], f"seed {seed}"


def leaves_of(checkpoint) -> dict:
    return {"/".join(path): leaf for path, leaf in checkpoint.tensors()}


def equal(first: dict, second: dict) -> bool:
    return [*first] == [*second] and all(
        jax.tree.structure(first[name]) == jax.tree.structure(second[name])
        and all(
            np.array_equal(a, b)
            for a, b in zip(
                jax.tree.leaves(first[name]), jax.tree.leaves(second[name]), strict=True
            )
        )
        for name in first
    )
