"""Passwords and access tokens in a recipe are refused before anything is written."""

import argparse
import dataclasses
import types
from typing import NamedTuple

import pytest
import torch
import yaml

from mfwrap.records.secret_keys import (
    command_without_secrets,
    find_secret,
    is_secret,
    without_secrets,
)
from mfwrap.runner.document import RecipeDocument, RecipeError


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


@pytest.mark.parametrize(
    "value",
    [
        "github_pat_11ABCDEFG0" + 20 * "a1",
        "glpat-" + 20 * "b",
        "xoxb-1234567890-abcdefghij",
        "AIza" + 35 * "c",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "https://" + 12 * "d2" + "@github.com/me/data",
        "authorization: token " + 8 * "e",
        "X-Api-Key: " + 8 * "f",
        "dckr_pat_" + 20 * "g",
        "sk_live_" + 20 * "h",
        "sk-proj-" + 20 * "iJ3",
        "pypi-AgEI" + 20 * "k",
        "Bearer " + 8 * "l4",
    ],
)
def test_secrets_are_known_by_their_form(value):
    """Under a name that says nothing, too, a token is refused in a recipe and hidden in a file."""
    assert find_secret({"note": value}) == ("note",)
    hidden = without_secrets({"note": f"see {value} there"})["note"]
    assert "***" in hidden
    assert value not in hidden
    assert hidden.startswith("see ")
    assert hidden.endswith((" there", "github.com/me/data there"))


@pytest.mark.parametrize(
    "secret", [["ONE", "TWO"], {"user": "me", "value": "ONE"}, {"ONE"}, ("ONE",), 1234]
)
@pytest.mark.parametrize("name", ["api_key", "credentials", "wandb_key", "Authorization"])
def test_all_values_under_the_name_of_a_secret_are_hidden(name, secret):
    """A list, a mapping or a number under the name of a secret is hidden as a text is."""
    assert without_secrets({"a": [{name: secret}]}) == {"a": [{name: "***"}]}
    assert without_secrets({name: {}, "b": {name: []}}) == {name: {}, "b": {name: []}}


@pytest.mark.parametrize(
    ("address", "hidden"),
    [
        ("https://hooks.slack.com/services/T1/B2/x3", "https://hooks.slack.com/***"),
        ("https://host/data?sv=1&sig=a%2Fb&se=2", "https://host/data?sv=1&***&se=2"),
        ("https://host/data?api_key=abc", "https://host/data?***"),
        ("https://host/data?page=2&sort=key", "https://host/data?page=2&sort=key"),
    ],
)
def test_secrets_in_addresses_are_hidden(address, hidden):
    """Parameters of a URL that authorize a request are hidden, and the rest of it stays."""
    assert without_secrets({"note": address}) == {"note": hidden}


@dataclasses.dataclass
class Service:
    """Settings of a user's own class."""

    api_key: str
    name: str = "x"


class Login(NamedTuple):
    """Settings of a user's own tuple."""

    password: str
    user: str = "me"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Service("PASSWORD"), {"api_key": "***", "name": "x"}),
        (Login("PASSWORD"), {"password": "***", "user": "me"}),
        (argparse.Namespace(auth_token=1234, lr=1), {"auth_token": "***", "lr": 1}),
        (types.SimpleNamespace(a=[Service("PASSWORD")]), {"a": [{"api_key": "***", "name": "x"}]}),
        (Service, str(Service)),
    ],
)
def test_fields_of_objects_are_hidden(value, written):
    """An object with fields is written as a mapping, so that the names of its secrets count."""
    assert without_secrets({"settings": value}) == {"settings": written}


@dataclasses.dataclass
class Node:
    """Settings that may hold themselves."""

    parent: object = None


class Failing(Node):
    """Settings whose field cannot be read."""

    @property
    def parent(self):
        """Raise an error."""
        message = "not yet"
        raise RuntimeError(message)

    @parent.setter
    def parent(self, value):
        """Take no value."""


def test_settings_that_hold_themselves_or_fail():
    """A field that leads back to its owner, or raises, does not end the loop."""
    node, names, held = Node(), argparse.Namespace(), {}
    node.parent, names.own, held["own"] = node, names, held

    assert without_secrets({"a": node}) == {"a": {"parent": "..."}}
    assert without_secrets({"a": [names, names]}) == {"a": [{"own": "..."}, {"own": "..."}]}
    assert without_secrets(held) == {"own": "..."}
    assert without_secrets({"a": Failing()}) == {"a": {"parent": "(RuntimeError)"}}


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "</s>", "pad_token_id": 0, "max_new_tokens": 20, "tokens": [1]},
        {"key": "value", "sort_keys": ["a"], "num_keys": 3, "passes": 3, "author": "me"},
        {"digest": "a94a8fe5ccb19ba61c4c0873d391e987982fbbd3", "url": "https://host/data"},
        {"remote": "ssh://git@github.com/me/data", "mail": "me@host.org", "path": "a:b@c"},
    ],
)
def test_plain_settings_stay(settings):
    """Settings whose names or forms only resemble those of secrets are written as they are."""
    assert without_secrets(settings) == settings
    assert find_secret(settings) is None


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
        (["train.py", "--wandb-key", "SECRET", "--lr", "1"], "train.py --wandb-key *** --lr 1"),
        (["train.py", "--api-keys", "ONE", "TWO", "-v"], "train.py --api-keys *** *** -v"),
        (
            ["train.py", "--header", "Authorization: Bearer SECRET", "--header=Cookie"],
            "train.py --header *** --header=Cookie",
        ),
        (["train.py", "a https://SECRET@host/x"], "train.py 'a https***host/x'"),
    ],
)
def test_a_command_without_secrets(words, shown):
    """The value of a secret is replaced in its word or in the next one; the rest is unchanged."""
    assert command_without_secrets(words) == shown


@pytest.mark.parametrize(
    "name",
    [
        "runs/global-batch-512-lr-3e-4",
        "glove-wiki-gigaword-100",
        "glue-mrpc-finetuned-bert",
        "glacier-classification-v2-large",
        "sk-en-parallel-corpus-v1",
        "pypi-package-descriptions",
        "bearer instruments",
    ],
)
def test_ordinary_names_are_no_secrets(name):
    """Names that begin like tokens are accepted in a recipe, and shown."""
    assert find_secret({"note": name}) is None
    assert without_secrets({"note": name}) == {"note": name}
