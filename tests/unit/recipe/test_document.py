"""A recipe's YAML is read as plain values, with the place of each."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.recipe.document import RecipeDocument, RecipeError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def read(text: str) -> dict:
    """Return what a text says."""
    return RecipeDocument.parse(text, "r.yaml").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.e-5", 1e-5),
        ("5E3", 5000.0),
        (".5", 0.5),
        ("-7", -7),
        ("0x10", 16),
        ("0o17", 15),
        ("010", 10),
        (".inf", math.inf),
        ("True", True),
        ("false", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("'3e-4'", "3e-4"),
        ("1e", "1e"),
    ],
)
def test_scalars(text, value):
    """Scalars are those of YAML 1.2: numbers with exponents are numbers, ``no`` is a word."""
    found = read(f"a: {text}")["a"]

    assert (found, type(found)) == (value, type(value))


@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_what_is_written_is_read(data):
    """Whatever plain values PyYAML writes are read as they were."""
    assert read(yaml.safe_dump(data, allow_unicode=True)) == data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "r.yaml, line 3: has the key `a` twice, first in line 1"),
        ("a:\n  x: 1\n  x: 2\n", "r.yaml, line 3: has the key `x` twice, first in line 2"),
        ("a: [1\nb: 2\n", "r.yaml, line 2: must be YAML"),
        ("a: !!python/object/apply:os.system [x]\n", "r.yaml, line 1: has the tag"),
        ("a: !!binary aGk=\n", "r.yaml, line 1: has the tag"),
        ("- 1\n", "r.yaml: must be a mapping of sections, got a list"),
        ("[a]: 1\n", "r.yaml, line 1: has a key that is no string"),
        ("a: &x [*x]\n", "is nested deeper than 50 levels"),
        ("a: \x00\n", "r.yaml: must be YAML"),
    ],
)
def test_what_is_no_recipe_is_refused(text, message):
    """An error names file and line, in one line."""
    with pytest.raises(RecipeError) as error:
        read(text)

    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_aliases_cannot_make_a_file_endless():
    """Aliases of aliases are counted."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]

    with pytest.raises(RecipeError, match="more than 10000 values"):
        read("\n".join(lines))


def test_merge_keys():
    """A merged mapping gives way to what is written."""
    text = "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\n"

    assert read(text)["more"] == {"a": 1, "b": 3}


def test_places_are_lines():
    """Each value knows its line; what is missing has that of what is around it."""
    document = RecipeDocument.parse("a:\n  b: 1\nc:\n  - d: 2\n  - d: 3\n", "r.yaml")

    assert document.place(("a", "b")) == "line 2"
    assert document.place(("c", 1, "d")) == "line 5"
    assert document.place(("a", "missing")) == "line 1"


def test_overrides_replace_values():
    """An override reaches into mappings and lists, makes sections, and leaves the rest alone."""
    document = RecipeDocument.parse("a: {b: 1, c: 2}\nl: [{x: 1}, {x: 2}]\n", "r.yaml")
    changed = document.overridden(["a.b=3e-4", "l.1.x=[1, 2]", "new.deep.key=no", "a.c="])

    assert changed.data == {
        "a": {"b": 3e-4, "c": None},
        "l": [{"x": 1}, {"x": [1, 2]}],
        "new": {"deep": {"key": "no"}},
    }
    assert document.data == {"a": {"b": 1, "c": 2}, "l": [{"x": 1}, {"x": 2}]}
    assert changed.place(("a", "b")) == "--set a.b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a", "--set: must be key=value"),
        ("a..b=1", "--set: must be key=value"),
        ("=1", "--set: must be key=value"),
        ("a.b.c=1", "`a.b` must be a mapping, got 1"),
        ("l.2=1", "'2' must be an index below 2"),
        ("l.x=1", "'x' must be an index below 2"),
        ("a.b=[1", "must be YAML"),
    ],
)
def test_wrong_overrides(override, message):
    """An override that leads nowhere is refused in one line."""
    document = RecipeDocument.parse("a: {b: 1}\nl: [1, 2]\n", "r.yaml")
    with pytest.raises(RecipeError) as error:
        document.overridden([override])

    assert message in str(error.value)
    assert "\n" not in str(error.value)
