"""Do samples survive being written, being cut short and being damaged?"""

import errno
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from helios_jax.distill import store as stores
from helios_jax.distill.store import Labels, Sequence, open_store, read_store


def sequences(seed: int, whole: bool = False) -> list[Sequence]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(3):
        num_prompt, num_sampled = random.integers(1, 5), random.integers(0, 6)
        K = 4
        ids = random.integers(100, size=(num_sampled, K)).astype(np.int32)
        labels = Labels(
            None if whole else ids,
            random.normal(size=(num_sampled, K)).astype(np.float32),
            np.full(num_sampled, -np.inf, np.float32),
            random.normal(size=(num_sampled, 8)).astype(ml_dtypes.bfloat16) if whole else None,
        )
        tokens = random.integers(100, size=num_prompt + num_sampled).astype(np.int32)
        made.append(Sequence(tokens, int(num_prompt), 0.5, labels))
    return made


def equal(first: list[Sequence], second: list[Sequence]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(a.tokens, b.tokens)
        and (a.num_prompt, a.temperature) == (b.num_prompt, b.temperature)
        and all(
            np.array_equal(x, y) if x is not None and y is not None else x is y
            for x, y in zip(a.labels, b.labels, strict=True)
        )
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_written_is_read(tmp_path: Path, whole):
    with open_store(tmp_path, {"a": 1}) as store:
        store.write(0, sequences(0, whole))
        store.write(1, sequences(1, whole))
    again = read_store(tmp_path)
    assert again.indices == [0, 1] and not again.damaged
    assert equal(again.sequences(), sequences(0, whole) + sequences(1, whole))


def test_a_store_of_something_else_is_refused_and_says_what(tmp_path: Path):
    with open_store(tmp_path, {"seed": 1}):
        pass
    with pytest.raises(ValueError, match="seed=1, not 2"), open_store(tmp_path, {"seed": 2}):
        pass


def test_two_processes_do_not_share_a_store(tmp_path: Path):
    with open_store(tmp_path, {}), pytest.raises(ValueError, match="another process"):
        with open_store(tmp_path, {}):
            pass


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_shard_is_told_and_missing(tmp_path: Path, damage):
    with open_store(tmp_path, {}) as store:
        store.write(0, sequences(0))
        store.write(1, sequences(1))
    [path] = tmp_path.glob("shard_00001-*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "flipped" else content[:-9])
    again = read_store(tmp_path)
    assert again.indices == [0] and again.damaged == [path]
    with pytest.raises(ValueError, match="has no shard 1"):
        again.read(1)
    # Other bits, as a faster form of the target may give: the damaged ones must not stay beside.
    with open_store(tmp_path, {}) as store:
        assert store.damaged == [path] and not path.exists()
        store.write(1, sequences(2))
    with open_store(tmp_path, {}) as store:
        assert not store.damaged and equal(store.read(1), sequences(2))


def test_opening_and_reading_sums_every_shard_once(tmp_path: Path, monkeypatch):
    with open_store(tmp_path, {}) as store:
        store.write(0, sequences(0))
        store.write(1, sequences(1))
    summed = []
    monkeypatch.setattr(
        stores, "_sum", lambda content, of=stores._sum: summed.append(content) or of(content)
    )
    with open_store(tmp_path, {}) as store:
        assert len(store.sequences()) == 6
    assert len(summed) == len({*summed}) == 2


def test_a_full_disk_leaves_the_earlier_shards_and_nothing_else(tmp_path: Path, monkeypatch):
    with open_store(tmp_path, {}) as store:
        store.write(0, sequences(0))

        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(stores.os, "fsync", full)
        with pytest.raises(OSError, match="the disk is full: shard 1") as raised:
            store.write(1, sequences(1))
        assert raised.value.errno == errno.ENOSPC
        monkeypatch.undo()
        assert [path.name[:11] for path in tmp_path.glob("shard_*")] == ["shard_00000"]
        store.write(1, sequences(1))
    assert equal(read_store(tmp_path).sequences(), sequences(0) + sequences(1))


def test_what_a_killed_process_left_is_removed(tmp_path: Path):
    (tmp_path / "shard_00000-abc.npz.partial").write_bytes(b"half")
    with open_store(tmp_path, {}) as store:
        assert store.indices == [] and not [*tmp_path.glob("*.partial")]


def test_where_there_are_no_samples(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no samples"):
        read_store(tmp_path)
