"""Passwords and access tokens in a recipe are refused before anything is written."""

import pytest
import yaml

from mfwrap.recipe.document import RecipeDocument, RecipeError
from mfwrap.recipe.secret_keys import find_secret, is_secret


def read(text: str) -> dict:
    """Return the values of a YAML text."""
    return RecipeDocument.parse(text, "r.yaml").data


@pytest.mark.parametrize(
    "text",
    [
        "training: {hub_token: PASSWORD}",
        "training:\n  hub_token: [PASSWORD]",
        "a: [{apiKey: PASSWORD}]",
        "a: {wandb-api-key: PASSWORD}",
        "token: PASSWORD",
        "a: {b: {smtp_password: PASSWORD}}",
        "training: {run_name: hf_PASSWORDabcdefghijklmnop}",
        "data: {path: 'https://me:PASSWORD@host/data'}",
    ],
)
def test_secrets_are_refused(text):
    """A secret is refused in a file and in an override, and the error does not repeat it."""
    data = yaml.safe_load(text)
    name = next(iter(data))
    for read_it in (
        lambda: read(f"x: 1\n{text}\n"),
        lambda: RecipeDocument({}, {}, {}).overridden([f"{name}={data[name]!r}"]),
    ):
        with pytest.raises(RecipeError, match="expected no secret in a recipe") as error:
            read_it()
        assert "PASSWORD" not in str(error.value)
        assert "HF_TOKEN" in str(error.value)


def test_what_is_not_a_secret():
    """Names of special tokens, and secrets that are turned off, are accepted."""
    text = "a: {eos_token: </s>, hub_token: null, use_auth_token: true, num_tokens: 3, key: x}"

    assert len(read(text)["a"]) == 5


def test_paths_of_secrets():
    """A secret is found by its key or by its form, and its path is returned."""
    token = "hf_" + 20 * "a"

    assert is_secret(("training", "hub_token"))
    assert not is_secret(())
    assert find_secret({"a": [{"b": 1}, {"hubToken": "x"}]}) == ("a", 1, "hubToken")
    assert find_secret({"a": {"run_name": token}}) == ("a", "run_name")
    assert find_secret({"enc_key": "None", "password": ""}) is None
