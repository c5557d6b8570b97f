"""Passwords and access tokens in a recipe are refused before anything is written."""

import pytest
import torch
import yaml

from mfwrap.recipe.document import RecipeDocument, RecipeError
from mfwrap.records.secret_keys import (
    command_without_secrets,
    find_secret,
    is_secret,
    without_secrets,
)


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


def test_settings_without_secrets():
    """Secrets become ``***``, and values that are not plain become text."""
    token = "hf_" + 20 * "a"
    settings = {
        "training": {"hub_token": token, "learning_rate": 1e-3, "betas": (0.9, 0.95)},
        "data": [{"path": "https://me:PASSWORD@host/data"}, {"eos_token": "</s>"}],
        "note": f"with {token} inside",
        "password": "None",
        "dtype": torch.bfloat16,
        1: True,
    }

    assert without_secrets(settings) == {
        "training": {"hub_token": "***", "learning_rate": 1e-3, "betas": [0.9, 0.95]},
        "data": [{"path": "https***host/data"}, {"eos_token": "</s>"}],
        "note": "with *** inside",
        "password": "None",
        "dtype": "torch.bfloat16",
        "1": True,
    }
    assert find_secret(without_secrets(settings) | {"training": None}) is None


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["train.py", "--lr", "0.1", "--name", "two words"],
            "train.py --lr 0.1 --name 'two words'",
        ),
        (["train.py", "--hub-token=SECRET", "x"], "train.py --hub-token=*** x"),
        (["train.py", "--hub_token", "SECRET", "x"], "train.py --hub_token *** x"),
        (
            ["train.py", "--set", "training.hub_token=SECRET"],
            "train.py --set training.hub_token=***",
        ),
        (["train.py", "--use-token", "--lr", "1"], "train.py --use-token --lr 1"),
        (["train.py", "hf_" + 20 * "a"], "train.py ***"),
    ],
)
def test_a_command_without_secrets(words, shown):
    """The value of a secret is replaced in its word or in the next one; the rest is unchanged."""
    assert command_without_secrets(words) == shown
