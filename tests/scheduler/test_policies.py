"""Are policies found by name, and those that cannot work refused before they serve anything?"""

import sys

import pytest

from helios_jax.scheduler import find_policy, urgency

MODULE = """
import jax.numpy as jnp

def newest(state, now):
    return state.arrival_time_R - now

def scalar(state, now):
    return jnp.float32(0)

def integers(state, now):
    return state.num_prompt_R

def broken(state, now):
    return state.no_such_field

class Nested:
    newest = staticmethod(newest)

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(MODULE)
    (tmp_path / "my_broken_module.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_policies", None)


def test_shipped_policies_have_names():
    for name, function in urgency.POLICIES.items():
        assert find_policy(name) is function


@pytest.mark.parametrize("name", ["my_policies:newest", "my_policies:Nested.newest"])
def test_a_function_of_ones_own(name):
    policy = find_policy(name)
    assert policy.__name__ == "newest" and policy.__module__ == "my_policies"


@pytest.mark.parametrize("name, match", [
    ("lifo", "must be one of deadline, priority, fcfs, shortest, or module:function"),
    (":newest", "or module:function"),
    ("my_policies:", "or module:function"),
    ("no_such_module_here:f", "cannot import 'no_such_module_here'.*PYTHONPATH"),
    ("my_broken_module:f", "No module named 'no_such_package_here'"),
    ("my_policies:oldest", "'my_policies' has no function 'oldest'"),
    ("my_policies:number", "'my_policies' has no function 'number'"),
    ("my_policies:no.such", "'my_policies' has no function 'no.such'"),
    ("my_policies:scalar", r"for 5 rows it returned float32 \(\)"),
    ("my_policies:integers", r"it returned int32 \(5,\)"),
    ("my_policies:broken", "it raised AttributeError"),
])  # fmt: skip
def test_what_cannot_work_is_refused(name, match):
    with pytest.raises(ValueError, match=match) as raised:
        find_policy(name)
    assert f"policy={name!r}" in str(raised.value)
