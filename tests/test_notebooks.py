"""Are the notebooks committed without outputs, and found by the command that runs them?"""

import ast
import json
from pathlib import Path

import pytest

from notebooks.run import FOLDER, find

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict]:
    return [each for each in json.loads(path.read_text())["cells"] if each["cell_type"] == kind]


def test_there_are_five():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]
    assert find(["01", "05"]) == [NOTEBOOKS[0], NOTEBOOKS[4]] and find([]) == NOTEBOOKS
    with pytest.raises(ValueError, match="none begins so"):
        find(["06"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped_and_cells_are_python(path):
    code = cells(path, "code")
    assert all(not each["outputs"] and each["execution_count"] is None for each in code)
    assert cells(path, "markdown")[0]["source"][0].startswith("# ")
    for each in code:
        ast.parse("".join(each["source"]))
