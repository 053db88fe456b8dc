"""Does any damage to a quantised checkpoint end in a ValueError, soon and in little memory?"""

import json
import struct

import numpy as np
import pytest

from checkpoints_conv import open_checkpoint
from tests.checkpoints.test_damaged_files import read_all, try_mutations
from tests.checkpoints.tiny_quantised import copy_fixture

NAMES = [
    "autoawq",
    "auto_gptq_3bit",
    "gptqmodel_v2_act_order",
    "compressed_w4a16_asym",
    "compressed_fp8",
]
VALUES = [None, 0, -1, 1, 3, 7, 2**31, 1.5, "", "x", "gptq_v2", True, [], [1, 2], {}, {"a": {}}]


@pytest.mark.parametrize("name", NAMES)
def test_headers(tmp_path, name):
    folder = copy_fixture(name, tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    survived = try_mutations(folder, path.write_bytes, data, 60, end=end)
    assert survived < 30
    for length in (0, 7, end - 1, end, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            open_checkpoint(folder)


@pytest.mark.parametrize("name", NAMES)
def test_contents(tmp_path, name):
    """Damaged codes are other codes; a damaged g_idx, shape or KV scale is found."""
    folder = copy_fixture(name, tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    survived = try_mutations(folder, path.write_bytes, data, 20, start=start, seed=3)
    assert survived >= 1


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_any_type(tmp_path, name):
    folder = copy_fixture(name, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    places = _places(config["quantization_config"])
    rng = np.random.default_rng(5)
    survived = 0
    for keys in places:
        for value in rng.permutation(len(VALUES))[:4]:
            changed = json.loads(json.dumps(config))
            at = changed["quantization_config"]
            for key in keys[:-1]:
                at = at[key]
            at[keys[-1]] = VALUES[value]
            path.write_text(json.dumps(changed))
            survived += read_all(folder)
    assert survived < 4 * len(places)


def _places(value, keys=()):
    found = [keys] if keys else []
    if isinstance(value, dict):
        found += [place for key, item in value.items() for place in _places(item, (*keys, key))]
    return found
