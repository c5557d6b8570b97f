"""Errors of other libraries name the key of the recipe that they are about."""

import json

import pytest
from huggingface_hub.errors import HfHubHTTPError
from jinja2.exceptions import TemplateError
from torch import nn

from mfwrap.recipes.data.files import JsonLinesSource
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.runner.document import RecipeDocument
from mfwrap.runner.failures import named_failure

TEXT = """\
data: {path: rows.jsonl}
training:
  push_to_hub: true
peft:
  target_modules: [query_key_value]
callbacks: [{type: SampleMonitor}]
"""
DOCUMENT = RecipeDocument.parse(TEXT, "r.yaml")


def network():
    """Return a network with two linear layers of one name."""
    return nn.ModuleDict(
        {
            part: nn.ModuleDict({"q_proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
            for part in ("first", "second")
        }
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Target modules {'x'} not found", "r.yaml:5: peft.target_modules: match no module of "),
        ("size mismatch for base_model.model.q", "r.yaml:4: peft: the checkpoint has an adapter "),
        (
            "`eos_token` ('x') is not found in the vocabulary",
            "r.yaml:2: training.eos_token: must be a token of the tokenizer; leave it out",
        ),
        (
            "CometCallback requires comet-ml to be installed",
            "r.yaml:2: training.report_to: names a tracker whose package is not installed",
        ),
        (
            "SampleMonitor needs step_interval in a training without evaluations, got None",
            "r.yaml:6: callbacks: have a SampleMonitor without step_interval; set it, or training.",
        ),
    ],
)
def test_known_errors(text, says):
    """The key, its line, what to do and the library's own sentence are in the message."""
    found = str(named_failure(DOCUMENT, ValueError(text), network=network()))

    assert found.startswith(says)
    assert f"(ValueError: {text}" in found


def test_layers_for_an_adapter():
    """The names of linear layers are listed, each once."""
    error = ValueError("Target modules {'x'} not found")

    assert "its linear layers are ['q_proj'] (" in str(
        named_failure(DOCUMENT, error, network=network())
    )


def test_a_long_error_of_a_library():
    """Only its first sentence is passed on, from what names the cause."""
    text = "Error(s) in loading:\n size mismatch for base_model.q: [2] from the file. And so on."
    found = str(named_failure(DOCUMENT, RuntimeError(text)))

    assert found.endswith("(RuntimeError: size mismatch for base_model.q: [2] from the file)")


def test_a_refused_chat(tmp_path):
    """The line of the first chat that the template refuses is named with its roles."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    chats = [[{"role": role, "content": "a"}] for role in ("user", "system", "user")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps({'turns': chat})}\n" for chat in chats))
    found = named_failure(
        DOCUMENT,
        TemplateError("no system"),
        source=JsonLinesSource(path=str(file), columns={"messages": "turns"}),
        tokenizer=tokenizer,
    )

    assert str(found) == (
        "r.yaml:1: data: the chat template of the tokenizer refuses messages with the roles "
        f"['system'], at {file}:2: no system; change the roles (some templates have no 'system'), "
        "or set model.chat_template, for example to chatml"
    )


def test_the_hub():
    """An error of the hub is about `push_to_hub`, if that is set."""
    error = HfHubHTTPError.__new__(HfHubHTTPError)
    Exception.__init__(error, "401 Unauthorized")
    found = str(named_failure(DOCUMENT, error))

    assert found.startswith("r.yaml:3: training.push_to_hub: cannot create the repository on the ")
    assert named_failure(RecipeDocument.parse("data: {}", "r.yaml"), error) is None


def test_other_errors():
    """An error that is not known stays what it is."""
    assert named_failure(DOCUMENT, ValueError("of another kind")) is None
