"""A chat template is chosen by name, and is saved with the tokenizer."""

import json
from pathlib import Path

import pytest
import trl
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.chat_templates import (
    check_template,
    is_on_hub,
    set_template,
    template_names,
)
from mfwrap.recipes.models.loading import ModelError
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.runner import RecipeError
from mfwrap.runner.run import build_trainer
from support.recipe_data import LANGUAGE, recipe_of, save_tokenizer, trainer_of

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN = ("<|im_start|>", "<|im_end|>")


def test_chatml():
    """ChatML ends turns with its own token, or with the tokenizer's if that has none of ChatML."""
    own, other = byte_tokenizer(), byte_tokenizer()
    own.add_tokens([*QWEN], special_tokens=True)
    for tokenizer, end in ((own, "<|im_end|>"), (other, "<|end|>")):
        set_template(tokenizer, "chatml")
        text = "".join(f"<|im_start|>{t['role']}\n{t['content']}{end}\n" for t in TURNS)

        assert tokenizer.apply_chat_template(TURNS, tokenize=False) == text
        assert tokenizer.eos_token == end
        asked = tokenizer.apply_chat_template(TURNS[:2], tokenize=False, add_generation_prompt=True)
        assert text.startswith(asked)
        assert asked.endswith("<|im_start|>assistant\n")


def test_chatml_begins_as_the_tokenizer_does(tmp_path):
    """A tokenizer that puts a token before each text has it before a conversation, too."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    set_template(tokenizer, "chatml")
    assert tokenizer.apply_chat_template(TURNS, tokenize=False).startswith("<|im_start|>system")

    begin = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[begin]
    )
    set_template(tokenizer, "chatml")
    assert tokenizer.apply_chat_template(TURNS, tokenize=False).startswith("<s><|im_start|>system")


def test_templates_of_trl():
    """The names are those of TRL's files that have a variant for training."""
    names = template_names()

    assert names[0] == "chatml"
    assert {"gemma3", "llama3", "phi3", "qwen3"} <= set(names)
    assert all((TEMPLATES / f"{name}_training.jinja").is_file() for name in names[1:])
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*QWEN], special_tokens=True)
    set_template(tokenizer, "qwen3")
    assert tokenizer.chat_template == (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    assert tokenizer.eos_token == QWEN[1]


def test_a_template_that_does_not_fit(json_lines):
    """A template whose end of an answer the tokenizer would cut in pieces is refused."""
    rows = [{"messages": TURNS}] * 2
    says = (
        r"^r:\d+: model\.chat_template: must fit the tokenizer, got 'qwen3', whose end of an "
        r"answer, '<\|im_end\|>\\n', is no token of the tokenizer; chatml ends answers with the "
        r"tokenizer's own token$"
    )
    with pytest.raises(RecipeError, match=says):
        trainer_of(
            "supervised_tuning", json_lines(rows), model=LANGUAGE | {"chat_template": "qwen3"}
        )


def test_a_template_that_fails():
    """A template that needs a token that the tokenizer lacks is refused with its reason."""
    says = r"^`chat_template` must fit .*, got 'llama3', which fails: 'bos_token' is undefined$"
    with pytest.raises(ValueError, match=says):
        set_template(byte_tokenizer(), "llama3")


def test_a_file(tmp_path, monkeypatch):
    """A Jinja file is read; if it ends answers with a token, a generation stops there."""
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text(
        "{% for message in messages %}{{ message.content }}<|reply|>{% endfor %}"
    )
    tokenizer = ModelSettings(config=LANGUAGE["config"], chat_template="own.jinja").make_tokenizer()

    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == "s<|reply|>a<|reply|>b<|reply|>"
    assert [tokenizer.eos_token, tokenizer.pad_token] == ["<|reply|>", "<|pad|>"]


def test_another_tokenizer(tmp_path):
    """The template of another tokenizer is taken, but not its tokens."""
    folder = save_tokenizer(tmp_path / "other", *QWEN, template="{{ messages[0].content }}")
    settings = ModelSettings(config=LANGUAGE["config"], chat_template=folder)
    tokenizer = settings.make_tokenizer()

    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert len(tokenizer) == 261


def test_the_template_is_saved(tmp_path):
    """A saved tokenizer has the template and the end of an answer."""
    base = save_tokenizer(tmp_path / "base", *QWEN)
    settings = ModelSettings(config=LANGUAGE["config"], tokenizer=base, chat_template="chatml")
    settings.make_tokenizer().save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")

    assert loaded.apply_chat_template(TURNS, tokenize=False).endswith("b<|im_end|>\n")
    assert loaded.eos_token == QWEN[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("qwen33", r"must be chatml, the name of a template of TRL .*, got 'qwen33'; .*'qwen3'"),
        ("none.jinja", r"must be chatml, .*, got 'none\.jinja'"),
        ("./none", r"must be an existing folder, or a name on the hub, got '\./none'"),
    ],
)
def test_unknown_names(name, says):
    """A name that is nothing known is an error at once, with a similar name."""
    with pytest.raises(ValueError, match=rf"^`chat_template` {says}"):
        check_template(name)


def test_names_on_the_hub():
    """Only the name of a tokenizer needs the hub."""
    assert is_on_hub("org/name")
    assert not is_on_hub("chatml")
    settings = ModelSettings(config=LANGUAGE["config"], chat_template="org/name")
    assert settings.obstacle == "`model.chat_template` names a tokenizer on the hub: org/name"


def test_a_name_that_the_hub_does_not_give(tmp_path, monkeypatch):
    """The error names the key, as for a model, also with the Trainer's own key."""

    def unreachable(*_, **__):
        msg = "couldn't connect"
        raise OSError(msg)

    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": TURNS}))
    own_key = recipe_of(
        "supervised_tuning",
        {"path": str(file), "eval_fraction": 0},
        model=LANGUAGE,
        chat_template_path="org/name",
        max_length=64,
    )
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(ModelError, match=r"^`chat_template` must name what .* on the hub: could"):
        ModelSettings(config=LANGUAGE["config"], chat_template="org/name").make_tokenizer()
    says = r"training\.chat_template_path: must name what can be loaded, got 'org/name': couldn"
    with pytest.raises(RecipeError, match=says):
        build_trainer(own_key)


def test_tasks_without_conversations():
    """A task that takes no conversations refuses the key."""
    model = LANGUAGE | {"chat_template": "chatml"}
    with pytest.raises(
        RecipeError, match=r"chat_template: is not a setting of a task without conversations"
    ):
        recipe_of("causal_lm", {"type": "python_topics"}, model=model)
