"""A recipe's YAML is read as plain values, and the place of each value is known."""

import itertools
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.runner.document import RecipeDocument, RecipeError, read_text, yaml_text

# Texts that YAML 1.1 or 1.2 takes for numbers, bools or dates must come back as text.
AMBIGUOUS = ["1e5", "12e4567", "0o17", "1.5e3", "0x1F", "no", "2026-01-01", "1:30", ".5", "~", "<<"]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.sampled_from(
    [*AMBIGUOUS, "a\x85b", "a\u2028b", " a\u2029"]
)
INTEGERS = st.integers(1 - 2**63, 2**63 - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | TEXT,
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
    """Plain values that are written as YAML are read back unchanged."""
    assert read(yaml_text(data)) == data


@given(st.dictionaries(TEXT, TEXT | INTEGERS, max_size=4))
def test_what_is_written_is_read_by_yaml_1_1(data):
    """Text stays text, and integers stay integers, also for PyYAML's own reader."""
    assert yaml.safe_load(yaml_text(data)) == data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3: the key 'a' is repeated; it was first set at r.yaml:1"),
        ("a:\n  x: 1\n  x: 2\n", "r.yaml:3: the key 'x' is repeated; it was first set at r.yaml:2"),
        ("a: [1\nb: 2\n", "r.yaml:2: invalid YAML"),
        (
            "a: !!python/object/apply:os.system [x]\n",
            "r.yaml:1: a: expected plain values, got the tag",
        ),
        ("a: !!binary aGk=\n", "r.yaml:1: a: expected plain values, got the tag"),
        ("a: !!seq {b: 1}\n", "r.yaml:1: a: expected plain values, got the tag"),
        ("a: !!bool maybe\n", "r.yaml:1: a: expected a value of type bool, got 'maybe'"),
        ("a: !!null x\n", "r.yaml:1: a: expected a value of type null, got 'x'"),
        ("- 1\n", "r.yaml: expected a mapping of sections, got a list"),
        ("[a]: 1\n", "r.yaml:1: expected a string as key"),
        ("a: &x [*x]\n", "expected at most 50 nested levels"),
        ("a:\n  b: " + 5_000 * "[", "r.yaml:2: expected at most 50 nested levels"),
        ("a: " + 5_000 * "{a: ", "r.yaml:1: expected at most 50 nested levels"),
        ("a: {<<: 1}\n", "r.yaml:1: <<: expected a mapping or a list of mappings, got a scalar"),
        ("a: " + 5_000 * "9", "r.yaml:1: a: expected an integer of at most 64 bits, got '999"),
        ("a: !!int x\n", "r.yaml:1: a: expected an integer of at most 64 bits, got 'x'"),
        ("a: 0x" + 17 * "f", "r.yaml:1: a: expected an integer of at most 64 bits, got '0xfff"),
        ("b: 1\na: \x00\n", r"r.yaml:2: invalid YAML: the character '\x00' is not allowed"),
        (
            'a: "\\0"\n',
            r"r.yaml:1: a: expected text without zero bytes and halves of surrogate pairs, got",
        ),
        (
            'a: "\\ud800"\n',
            r"r.yaml:1: a: expected text without zero bytes and halves of surrogate pairs, got",
        ),
        ('a: "\\UFFFFFFFF"\n', "r.yaml: invalid YAML: "),
        ('a: "\\U00110000"\n', "r.yaml: invalid YAML: "),
        (
            f"b: 1\na: {{b: [{10_000 * '1,'}]}}",
            "r.yaml:2: expected at most 10000 keys and values",
        ),
    ],
    ids=itertools.count(),
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

    with pytest.raises(RecipeError, match="at most 10000 keys and values"):
        read("\n".join(lines))


@pytest.mark.parametrize("step", ["<<: [*a{0}, *a{0}]", "<<: *a{0}, b: *a{0}"])
def test_merge_keys_cannot_make_a_file_endless(step):
    """Thirty mappings, each of which merges the one before it twice, are read at once."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{{step.format(i - 1)}}}" for i in range(1, 31)]

    assert read("\n".join(lines))["a30"]["x"] == 1


def test_a_mapping_that_merges_itself():
    """The mapping has its own pairs."""
    assert read("a: &a {<<: *a, b: 1}") == {"a": {"b": 1}}


def test_files_that_are_not_recipes(tmp_path):
    """A file that is too large or not UTF-8 is refused; the error names the line of a bad byte."""
    file = tmp_path / "r.yaml"
    file.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(RecipeError, match=r"r.yaml:2: expected UTF-8, got the byte 0xff$"):
        read_text(file)
    with pytest.raises(RecipeError, match=r"^/dev/zero: expected a recipe of at most 256 KiB"):
        read_text("/dev/zero")


def test_merge_keys():
    """Own keys take precedence over merged keys, and the first of several merged mappings."""
    text = (
        "base: &base {a: 1, rate: 2}\nmore: &more {<<: *base, rate: 3}\n"
        "less: &less {rate: 4}\nboth: {<<: [*more, *less]}\nown: {rate: 5, <<: [*less, *more]}\n"
    )

    assert read(text)["more"] == {"a": 1, "rate": 3}
    assert read(text)["both"] == {"a": 1, "rate": 3}
    assert read(text)["own"] == {"a": 1, "rate": 5}


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
        ("a.b={c: &x [*x]}", "--set a.b: a.b.c.0"),
        ("l." + 5_000 * "9" + "=1", "expected an index below 2 for this list"),
        (60 * "a." + "b=1", "--set: expected section.key=value"),
        ("a..hub_token=PASSWORD", "--set: expected section.key=value, got 'a..hub_token=...'"),
        ("a.b.hub_token=1", "--set a.b.hub_token: a.b: expected a mapping, got 1"),
    ],
)
def test_wrong_overrides(override, message):
    """An override that cannot be applied raises a one-line error."""
    document = RecipeDocument.parse("a: {b: 1}\nl: [1, 2]\n", "r.yaml")
    with pytest.raises(RecipeError) as error:
        document.overridden([override])

    assert message in str(error.value)
    assert "\n" not in str(error.value)
