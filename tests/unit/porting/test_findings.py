"""Uses are joined by name, and files that are no Python are named in one sentence."""

import pytest

from mfwrap.porting.findings import read_scripts

STEP = """
from mindspore import nn, ops
class Step(nn.TrainOneStepCell):
    def construct(self, x):
        return ops.depend(x, self.optimizer(x))
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script."""

    def write(name, text):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


def test_lines_of_a_name_are_joined(script):
    """A finding has all lines of a name, and the findings are in the order of the first lines."""
    text = (
        "from mindspore import Tensor, nn\nx = Tensor(1)\ny = nn.Dense(1, 2)\nz = Tensor, Tensor\n"
    )
    found = read_scripts([script("a.py", text)])

    assert [(one.name, one.lines, one.verdict) for one in found] == [
        ("mindspore.Tensor", (1, 2, 4), "write"),
        ("mindspore.nn", (1,), "write"),
        ("nn.Dense", (3,), "write"),
    ]
    assert str(found[0]).endswith(
        "a.py:1: mindspore.Tensor (also 2, 4): write `torch.tensor`, and `torch.Tensor` as a type"
    )


def test_each_sentence(script):
    """The sentence says that a name is the same, otherwise, left out, without one, or unknown."""
    text = (
        "from mindspore import nn, ops\nops.depend, nn.Lamb, nn.TrainOneStepCell, nn.NoSuchName\n"
        "def f(cb_params, optimizer):\n    cb_params.mode, optimizer.group_lr\n"
    )
    said = {one.name: (one.verdict, one.text) for one in read_scripts([script("a.py", text)])}

    assert said["ops.depend"] == (
        "leave out",
        "write nothing: statements of torch run in their order",
    )
    assert said["nn.Lamb"] == (
        "no counterpart",
        "no counterpart: torch and mfwrap have no such optimizer",
    )
    assert said["nn.TrainOneStepCell"] == ("same", "the same: `mfwrap.TrainOneStepCell`")
    assert said["nn.NoSuchName"] == ("unknown", "unknown: mfwrap does not know this name")
    assert said["cb_params.mode"] == ("same", "the same")
    assert said["optimizer.group_lr"] == (
        "write",
        "if this is MindSpore's optimizer: write `optimizer.param_groups`",
    )


MINE = """
import mindspore
from step import Step
class Mine(Step):
    def f(self): self.weights
"""


def test_classes_of_other_files_are_known(script):
    """A class may derive from one in a file that comes later."""
    files = [script("mine.py", MINE), script("step.py", STEP)]

    assert "self.weights" in {one.name for one in read_scripts(files)}
    assert "self.weights" not in {one.name for one in read_scripts(files[:1])}


BASE = "from mindspore import nn\nclass BaseStep(nn.TrainOneStepWithLossScaleCell):\n    pass\n"


@pytest.mark.parametrize(
    ("name", "imports", "base"),
    [
        ("base.py", "from base import BaseStep", "BaseStep"),
        ("base.py", "from .base import BaseStep as B", "B"),
        ("base.py", "from base import *", "BaseStep"),
        ("base.py", "import base", "base.BaseStep"),
        ("src/base.py", "import src.base as base", "base.BaseStep"),
        ("src/__init__.py", "from src import BaseStep", "BaseStep"),
        ("base.py", "from base import nn", "nn.TrainOneStepCell"),
        ("base.py", "import base as b", "b.nn.TrainOneStepCell"),
    ],
)
def test_what_comes_from_mindspore_through_another_file(script, name, imports, base):
    """A file that imports no MindSpore itself may have its classes and modules from one that does.

    A third file derives from a class of the second.
    """
    text = f"{imports}\nclass Step({base}):\n    def construct(self, x): self.optimizer(1)\n"
    last = "from child import Step\nclass Last(Step):\n    def f(self): self.grad\n"
    files = [script("last.py", last), script("child.py", text), script(name, BASE)]
    found = {(one.file, one.name) for one in read_scripts(files)}

    assert {(files[1], "self.optimizer(...)"), (files[0], "self.grad")} <= found
    assert read_scripts(files[:2]) == []


def test_a_name_of_another_library_in_a_file_without_mindspore(script):
    """A class of the same name that comes from another library is not taken for the user's."""
    text = "from other import BaseStep\nclass Step(BaseStep):\n    def f(self): self.grad\n"
    files = [script("child.py", text), script("base.py", BASE)]

    assert [one for one in read_scripts(files) if one.file == files[0]] == []


def test_two_classes_of_the_same_name(script):
    """The module says which class is meant; if it is not given, neither is taken."""
    other = "class Step:\n    pass\nimport mindspore\n"
    files = [script("mine.py", MINE), script("step.py", STEP), script("other.py", other)]
    assert "self.weights" in {one.name for one in read_scripts(files)}

    script("mine.py", MINE.replace("from step", "from .parts"))
    assert "self.weights" not in {one.name for one in read_scripts(files)}


def test_two_files_of_the_same_name(script):
    """Of two modules of the same name, the one in the folder of the script is taken."""
    files = [
        script("a/base.py", BASE),
        script("b/base.py", BASE.replace("BaseStep(", "Other(")),
        script(
            "a/child.py",
            "from .base import BaseStep\nclass Step(BaseStep):\n    construct = 1\n"
            "    def f(self): self.grad\n",
        ),
    ]

    assert "self.grad" in {one.name for one in read_scripts(files)}


def test_a_script_is_not_run(script):
    """A script with a side effect is only read."""
    file = script("a.py", "import mindspore\nopen('written', 'w')\nraise SystemExit(3)\n")

    assert len(read_scripts([file])) == 1
    assert not (file.parent / "written").exists()


def test_warnings_of_a_script_are_its_own(script):
    """Reading a script with a wrong escape does not warn: warnings are errors here."""
    assert len(read_scripts([script("a.py", "import mindspore\nx = '\\d' is 1\n")])) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n", "a.py:1: expected Python 3, got a syntax error: "),
        ("print 'x'\n", "a.py:1: expected Python 3, got a syntax error: "),
        (b"x = '\xff'\n", "a.py.*: expected Python 3, got a syntax error: "),
        (b"\x00", "a.py.*: expected .*: "),
    ],
)
def test_what_is_no_python(script, text, says):
    """A file that is no Python is named, with the line."""
    with pytest.raises(ValueError, match=says):
        read_scripts([script("a.py", text)])


def test_a_notebook_is_refused(script):
    """A notebook is JSON that parses as Python, and would seem to have no names."""
    text = '{"cells": [{"cell_type": "code", "source": ["import mindspore"]}]}'
    with pytest.raises(ValueError, match=r"a.ipynb: expected .*, got a notebook; convert it with"):
        read_scripts([script("a.ipynb", text)])


def test_a_star_import_is_named(script):
    """The sentence about a star import says that it is not followed."""
    (star,) = read_scripts([script("a.py", "from mindspore.nn import *\nDense(1, 2)\n")])

    assert (star.name, star.verdict) == ("nn.*", "unknown")
    assert star.text.startswith("unknown: star imports are not followed; import the names")


def test_an_expression_that_is_too_long(script):
    """An expression with too many parts is one sentence, not a RecursionError."""
    with pytest.raises(ValueError, match=r"a.py: expected .*too many parts"):
        read_scripts([script("a.py", "import mindspore\nrows" + ".map(f)" * 400)])


def test_what_is_no_file(tmp_path):
    """A folder and a file that does not exist are named."""
    with pytest.raises(ValueError, match="expected a Python file, but it cannot be read"):
        read_scripts([tmp_path])
    with pytest.raises(ValueError, match=r"none.py: expected a Python file, .*No such file"):
        read_scripts([tmp_path / "none.py"])
