"""Keys are taken with their types, and each is accounted for."""

import pytest

from mfwrap.runner import RecipeError
from support.model_config import PLACE, keys_of


def keys(**section):
    """Return keys at their usual place."""
    return keys_of(section)[0]


def test_a_value_is_taken_once():
    """A taken key is gone, and `None` counts as missing."""
    section = keys(hidden_size=64, num_layers=None)

    assert (section.size("hidden_size"), section.size("num_layers", 2)) == (64, 2)
    assert section.unknown(()) == []


@pytest.mark.parametrize(
    ("take", "value", "says"),
    [
        ("size", 0, "expected an integer >= 1, got 0"),
        ("size", True, "expected an integer >= 1, got True"),
        ("size", 1.5, "expected an integer >= 1, got 1.5"),
        ("number", "large", "expected a number, got 'large'"),
        ("number", True, "expected a number, got True"),
        ("number", [1], r"expected a number, got \[1\]"),
    ],
)
def test_a_wrong_type_is_an_error(take, value, says):
    """The error has the place of the key and the value."""
    with pytest.raises(RecipeError, match=says) as raised:
        getattr(keys(x=value), take)("x", 1)

    assert str(raised.value).startswith("m.yaml: model.model_config.x: ")


def test_other_wrong_types_are_errors():
    """Booleans, mappings and tokens are checked, too."""
    with pytest.raises(RecipeError, match="expected true or false, got 'yes'"):
        keys(x="yes").flag("x", default=False)
    with pytest.raises(RecipeError, match="expected a mapping, got 3"):
        keys(x=3).mapping("x")
    with pytest.raises(RecipeError, match="expected the id of a token, got 'a'"):
        keys_of({"bos_token_id": "a"})[0].token_ids(10)


def test_a_number_may_be_written_without_a_dot():
    """YAML 1.1 reads `1e-5` as a string."""
    assert keys(x="1e-5").number("x", 0.0) == 1e-5


def test_two_names_of_one_key():
    """A key may have two names if both have the same value."""
    section = keys(n_layer=2)
    section.merge("n_layer", "num_layers")
    assert section.size("num_layers") == 2

    with pytest.raises(RecipeError, match="expected the same value as num_layers"):
        keys(n_layer=2, num_layers=3).merge("n_layer", "num_layers")


def test_a_null_can_be_told_from_a_missing_key():
    """Some keys have a meaning for `None`."""
    assert keys(x=None).is_null("x")
    assert not keys().is_null("x")
    assert "x" not in keys(x=None)


def test_a_merged_key_keeps_its_name_in_the_file():
    """An error, a loss and a key without effect name the line that the file has."""
    section, source = keys_of({"n_layer": "two", "theta": 1.0, "rate": 0.1})
    for alias, name in (("n_layer", "num_layers"), ("theta", "base"), ("rate", "dropout")):
        section.merge(alias, name)

    section.drop("base")
    section.lose_dropout("dropout")
    with pytest.raises(RecipeError, match=r"model_config\.n_layer: expected an integer"):
        section.size("num_layers")

    assert source.without_effect == ["model.model_config.theta"]
    assert [loss.path for loss in source.losses] == [(*PLACE, "rate")]


def test_a_size_can_be_read_without_being_taken():
    """A key that is read twice stays."""
    section = keys(seq_length=8)

    assert section.peek_size("seq_length", 4) == 8
    assert "seq_length" in section
    assert keys().peek_size("seq_length", 4) == 4


def test_losses_name_the_value():
    """A loss says what the file sets."""
    section, source = keys_of({"a": 1, "rate": 0.5})

    assert not section.is_equal("a", 2, "the recipe trains 2")
    assert section.is_equal("missing", 2, "the recipe trains 2")
    section.lose_dropout("rate")
    section.lose_dropout("missing")
    assert [(loss.name, loss.path[-1]) for loss in source.losses] == [
        ("architecture", "a"),
        ("dropout", "rate"),
    ]
    assert source.losses[0].says == "the file sets a: 1; the recipe trains 2"


def test_the_rest_is_sorted():
    """Keys are without effect, part of the data, or unknown."""
    given = {"offset": 0, "seq_length": 8, "num_labels": 2, "hiden": 1, "more": 3, "gone": None}
    section, source = keys_of(given)

    assert section.unknown({"more"}) == ["num_labels", "hiden"]
    assert source.without_effect == [
        f"model.model_config.{key}" for key in ("offset", "more", "gone")
    ]


def test_a_key_that_no_class_reads_is_refused():
    """A key of another class is stored and not used; a misspelled one is an error."""
    section, source = keys_of({"num_labels": 2, "more": 3, "hiden": 1})

    with pytest.raises(RecipeError, match=r"model_config\.hiden: unknown key; no class"):
        section.refuse_unknown({"more"})

    assert source.without_effect == ["model.model_config.num_labels", "model.model_config.more"]
