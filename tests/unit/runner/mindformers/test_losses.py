"""Every kind of loss has a name and a meaning, and the importer uses no other."""

import ast

from mfwrap.runner.mindformers.losses import LOSSES
from support.paths import ROOT


def test_every_name_is_known():
    """A name in a call of ``lose`` is in the table, and each name of the table is in a call."""
    used = set()
    for file in (ROOT / "mfwrap/runner/mindformers").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr == "lose" and isinstance(node.args[0], ast.Constant):
                used.add(node.args[0].value)

    assert used <= LOSSES.keys()
    assert {"weights", "lora", "moe", "resume"} <= used
