"""The tables of tests/devices/README.md name each test that runs on a GPU, and no other."""

import ast
import re

from support.paths import TESTS

NAME = re.compile(r"`(?:([\w/]+\.py)::)?(test_\w+)`")
ON_CUDA = {"pytest.mark.cuda", "each_device"}


def marked_for_cuda() -> set[str]:
    """Return the tests with the mark ``cuda``, of all of their cases or of some."""
    return {
        f"{file.relative_to(TESTS).as_posix()}::{node.name}"
        for file in TESTS.rglob("test_*.py")
        if any(mark in (text := file.read_text(encoding="utf-8")) for mark in ON_CUDA)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and ON_CUDA & {ast.unparse(decorator) for decorator in node.decorator_list}
    }


def named_in(section: str) -> list[str]:
    """Return the tests in the table of a section; a name without a file is in the file before."""
    text = (TESTS / "devices" / "README.md").read_text(encoding="utf-8")
    text = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    found = []
    for line in text.splitlines():
        file = ""
        for match in NAME.finditer(line if line.startswith("| ") else ""):
            file = match[1] or file
            found.append(f"{file}::{match[2]}")
    return found


def test_each_test_on_a_gpu_stands_for_a_promise():
    """The table of promises names each test on a GPU once."""
    named = named_in("Promises")

    assert sorted(named) == sorted(marked_for_cuda())


def test_what_the_simulated_device_cannot_show_is_tested_on_a_gpu():
    """The table of the simulated device names tests on a GPU."""
    named = named_in("What the simulated device cannot show")

    assert len(named) >= 15
    assert set(named) <= marked_for_cuda()
