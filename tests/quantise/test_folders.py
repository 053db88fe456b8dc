"""Does a working folder belong to one process and one piece of work?"""

import pytest

from helios_jax.calibrate.folders import claim, locked


def test_one_holder_at_a_time(tmp_path):
    with locked(tmp_path / "a" / "work", "counting"):
        with pytest.raises(ValueError, match="another process is counting there; wait for it"):
            with locked(tmp_path / "a" / "work", "counting"):
                pass
    with locked(tmp_path / "a" / "work", "counting"):
        pass


def test_a_failure_that_is_kept_keeps_no_folder(tmp_path):
    """An exception holds its frames: the lock must not hang on their end."""
    with pytest.raises(ZeroDivisionError) as kept:
        with locked(tmp_path, "dividing"):
            _ = 1 / 0
    with locked(tmp_path, "dividing"):
        assert kept.value.__traceback__ is not None


def test_a_claim_is_of_one_identity(tmp_path):
    path = tmp_path / "work.json"
    assert claim(path, {"a": 1, "b": [2]}) and claim(path, {"b": [2], "a": 1})
    assert not claim(path, {"a": 2}) and claim(path, {"a": 1, "b": [2]})
    assert [found.name for found in tmp_path.iterdir()] == ["work.json"]
