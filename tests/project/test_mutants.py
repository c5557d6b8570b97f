"""`make mutants` plants faults where code decides, and chooses the same ones in every run."""

import importlib.util
import os
import subprocess
import sys
import tomllib

import pytest

from support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("mutations", ROOT / ".ci" / "mutations.py")
mutations = importlib.util.module_from_spec(SPEC)
# A dataclass looks up its module by name.
sys.modules["mutations"] = mutations
SPEC.loader.exec_module(mutations)

PACKAGES = ("step", "loss_scale", "average", "tensors", "accelerate", "trainer")

SOURCE = '''
LIMIT = 3

def chosen(values, most: int = 2, *, is_strict=True) -> list[int]:
    """Return at most 2 values."""
    if not values:
        message = f"no values below {most + 1}"
        raise ValueError(message)
    kept = [value for value in values if value < most and is_strict]
    for value in kept:
        if value is None:
            continue
        note(value, "a" + "b")
    return -max(kept) if len(kept) == most else kept[1:]
'''


def mutants_of(text, folder):
    """Return all mutants of a source text."""
    path = folder / "source.py"
    path.write_text(text, encoding="utf-8")
    return mutations.mutants_of(path, folder)


def test_faults_are_planted_where_code_decides(tmp_path):
    """Conditions, operators, numbers, defaults and statements are mutated, and no texts."""
    found = {mutant.after for mutant in mutants_of(SOURCE, tmp_path)}

    assert {
        "def chosen(values, most: int = (3), *, is_strict=True) -> list[int]:",
        "def chosen(values, most: int = 2, *, is_strict=(False)) -> list[int]:",
        "if not (not values):",
        "if (values):",
        "pass",
        "kept = ([value for value in values])",
        "kept = [value for value in values if (value <= most) and is_strict]",
        "kept = [value for value in values if (value < most or is_strict)]",
        "kept = [value for value in values if (is_strict)]",
        "if (value is not None):",
        "break",
        "return (max(kept)) if len(kept) == most else kept[1:]",
        "return -(min(kept)) if len(kept) == most else kept[1:]",
        "return (kept[1:] if len(kept) == most else -max(kept))",
        "return -max(kept) if len(kept) == most else kept[(2):]",
    } <= found
    assert not any("LIMIT" in text or "at most" in text or '"a" -' in text for text in found)
    assert not any("most - 1" in text for text in found)


def test_each_mutant_changes_the_code_and_compiles(tmp_path):
    """Each mutant is valid Python, differs from the source, and has a key of its own."""
    found = mutants_of(SOURCE, tmp_path)

    for mutant in found:
        source = mutant.source(SOURCE.encode())
        assert source != SOURCE.encode()
        compile(source, "mutant", "exec")
    assert len({mutant.key for mutant in found}) == len(found)


def test_a_sample_hardly_changes_with_other_code(tmp_path):
    """A new line above changes no key, and the sample chooses the same mutants again."""
    before = mutations.sampled(mutants_of(SOURCE, tmp_path), 10, seed=1)
    after = mutations.sampled(mutants_of("import re\n" + SOURCE, tmp_path), 10, seed=1)
    other = mutations.sampled(mutants_of(SOURCE, tmp_path), 10, seed=2)

    assert len(before) == 10
    assert [mutant.key for mutant in after] == [mutant.key for mutant in before]
    assert [mutant.key for mutant in other] != [mutant.key for mutant in before]


def test_each_equivalent_mutant_exists():
    """Each listed equivalent mutant is still a mutant of the present code."""
    files = [path for name in PACKAGES for path in (ROOT / "mfwrap" / name).rglob("*.py")]
    keys = {mutant.key for path in files for mutant in mutations.mutants_of(path, ROOT)}
    listed = tomllib.loads((ROOT / ".ci" / "equivalent_mutants.toml").read_text(encoding="utf-8"))

    for mutant in listed["mutant"]:
        assert f"{mutant['in']}: {mutant['before']} -> {mutant['after']}" in keys
        assert mutant["reason"]


@pytest.mark.slow
def test_a_run_kills_a_mutant():
    """A run over one mutant, which loses the last elements of a large gradient, kills it."""
    key = "norms.append(torch.linalg.vector_norm(flat[-rest:], dtype=dtype).view(1)) -> pass"
    run = subprocess.run(
        [sys.executable, ".ci/mutants.py", "--size", "100000", "--only", key, "--folder", "test"],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].split() == ["all", "1", "0", "1", "0", "100.0%"]
