"""A recipe's YAML is read as plain values, and the place of each value is known."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.recipe.document import RecipeDocument, RecipeError

# Leave out Unicode's line breaks: PyYAML writes them without quotes, and reads them as spaces.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def read(text: str) -> dict:
    """Return the values of a YAML text."""
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
    """Scalars follow YAML 1.2: numbers may have exponents, and ``no`` is a string."""
    found = read(f"a: {text}")["a"]

    assert (found, type(found)) == (value, type(value))


@given(st.dictionaries(TEXT, PLAIN, max_size=4))
def test_what_is_written_is_read(data):
    """Plain values that PyYAML writes are read back unchanged."""
    assert read(yaml.safe_dump(data, allow_unicode=True)) == data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3: the key 'a' is repeated; it was first set at r.yaml:1"),
        ("a:\n  x: 1\n  x: 2\n", "r.yaml:3: the key 'x' is repeated; it was first set at r.yaml:2"),
        ("a: [1\nb: 2\n", "r.yaml:2: invalid YAML"),
        (
            "a: !!python/object/apply:os.system [x]\n",
            "r.yaml:1: expected plain values, got the tag",
        ),
        ("a: !!binary aGk=\n", "r.yaml:1: expected plain values, got the tag"),
        ("- 1\n", "r.yaml: expected a mapping of sections, got a list"),
        ("[a]: 1\n", "r.yaml:1: expected a string as key"),
        ("a: &x [*x]\n", "expected at most 50 nested levels"),
        ("a: \x00\n", "r.yaml: invalid YAML"),
    ],
)
def test_what_is_no_recipe_is_refused(text, message):
    """A text that is not a recipe raises a one-line error that says where the text is wrong."""
    with pytest.raises(RecipeError) as error:
        read(text)

    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_aliases_cannot_make_a_file_endless():
    """Expanded aliases count towards the maximum number of values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]

    with pytest.raises(RecipeError, match="at most 10000 values"):
        read("\n".join(lines))


def test_merge_keys():
    """Keys of a mapping take precedence over keys that are merged into it."""
    text = "base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}\n"

    assert read(text)["more"] == {"a": 1, "b": 3}


def test_places_are_lines():
    """The place of a value is its line; for a missing value, it is the line of its section."""
    document = RecipeDocument.parse("a:\n  b: 1\nc:\n  - d: 2\n  - d: 3\n", "r.yaml")

    assert document.place(("a", "b")) == "r.yaml:2"
    assert document.place(("c", 1, "d")) == "r.yaml:5"
    assert document.place(("a", "missing")) == "r.yaml:1"


def test_overrides_replace_values():
    """An override changes values in mappings and lists, adds sections, and changes nothing else."""
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
        ("a", "--set: expected section.key=value"),
        ("a..b=1", "--set: expected section.key=value"),
        ("=1", "--set: expected section.key=value"),
        ("a.b.c=1", "a.b: expected a mapping, got 1"),
        ("l.2=1", "expected an index below 2 for this list, got '2'"),
        ("l.x=1", "expected an index below 2 for this list, got 'x'"),
        ("a.b=[1", "--set a.b: invalid YAML"),
    ],
)
def test_wrong_overrides(override, message):
    """An override that cannot be applied raises a one-line error."""
    document = RecipeDocument.parse("a: {b: 1}\nl: [1, 2]\n", "r.yaml")
    with pytest.raises(RecipeError) as error:
        document.overridden([override])

    assert message in str(error.value)
    assert "\n" not in str(error.value)
