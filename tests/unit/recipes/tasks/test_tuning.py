"""TRL gets each form of rows as TRL documents it, and only the answers are learned."""

import copy

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.recipes.models.settings import ModelSettings, make_text_model
from mfwrap.runner import RecipeError
from support.recipe_data import LANGUAGE, learned, save_tokenizer, targets, trainer_of
from support.recipe_texts import SMALL_LLAMA

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")
ENDS = "<|end|>"
TRAINERS = {
    "supervised_tuning": (trl.SFTTrainer, trl.SFTConfig),
    "preference_tuning": (trl.DPOTrainer, trl.DPOConfig),
}


def said(role, content):
    """Return a message."""
    return {"role": role, "content": content}


def added(n):
    """Return a conversation of two answers, as OpenAI writes it."""
    return [
        said("system", "Add."),
        said("user", f"{n}+{n}?"),
        said("assistant", f"It is {n + n}."),
        said("user", "And 1?"),
        said("assistant", f"{n + n + 1}."),
    ]


SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}


def as_sharegpt(turns):
    """Return a conversation as ShareGPT writes it."""
    return [{"from": SHAREGPT[turn["role"]], "value": turn["content"]} for turn in turns]


def asked(n):
    """Return a question and two answers to it."""
    return [said("user", f"{n}?")], [said("assistant", f"yes {n}")], [said("assistant", f"no {n}")]


ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\nAdd."
    "\n\n### Input:\n{n} and 1\n\n### Response:"
)
"""The text of Stanford Alpaca's train.py, from which the answer follows."""

WITH_ANSWERS = {"assistant_only_loss": True}

TUNED = {
    "messages": (lambda n: {"messages": added(n)}, lambda n: {"messages": added(n)}, WITH_ANSWERS),
    "messages with the keys of sharegpt": (
        lambda n: {"messages": as_sharegpt(added(n))},
        lambda n: {"messages": added(n)},
        WITH_ANSWERS,
    ),
    "sharegpt": (
        lambda n: {"id": n, "conversations": as_sharegpt(added(n))},
        lambda n: {"messages": added(n)},
        WITH_ANSWERS,
    ),
    "sharegpt with a column system": (
        lambda n: {"conversations": as_sharegpt(added(n)[1:]), "system": "Add." if n else None},
        lambda n: {"messages": added(n)[0 if n else 1 :]},
        WITH_ANSWERS,
    ),
    "conversations with roles": (
        lambda n: {"conversations": added(n)},
        lambda n: {"messages": added(n)},
        WITH_ANSWERS,
    ),
    "all turns": (
        lambda n: {"conversations": as_sharegpt(added(n))},
        lambda n: {"messages": added(n)},
        {"assistant_only_loss": False},
    ),
    "alpaca": (
        lambda n: {"instruction": "Add.", "input": f"{n} and 1", "output": f"{n + 1}"},
        lambda n: {
            "prompt": [said("user", f"Add.\n{n} and 1")],
            "completion": [said("assistant", f"{n + 1}")],
        },
        {},
    ),
    "alpaca without input": (
        lambda n: {"instruction": f"Add {n}.", "input": "", "output": f"{n + 1}"},
        lambda n: {
            "prompt": [said("user", f"Add {n}.")],
            "completion": [said("assistant", f"{n + 1}")],
        },
        {},
    ),
    "prompts": (
        lambda n: {"prompt": f"{n} and 1 is", "completion": f" {n + 1}"},
        lambda n: {"prompt": f"{n} and 1 is", "completion": f" {n + 1}"},
        {},
    ),
    "prompts of messages": (
        lambda n: {"prompt": added(n)[:2], "completion": added(n)[2:3]},
        lambda n: {"prompt": added(n)[:2], "completion": added(n)[2:3]},
        {},
    ),
    "a text with an answer of messages": (
        lambda n: {"prompt": f"{n}+{n}?", "completion": added(n)[2:3]},
        lambda n: {"prompt": added(n)[1:2], "completion": added(n)[2:3]},
        {},
    ),
    "texts": (lambda n: {"text": f"text {n}"}, lambda n: {"text": f"text {n}"}, {}),
}
"""By form of rows: a row of a user, the same row as TRL documents it, and settings of TRL."""


def explicit(n):
    """Return a row with a prompt and two answers as messages."""
    return dict(zip(("prompt", "chosen", "rejected"), asked(n), strict=True))


def implicit(n):
    """Return a row with two whole conversations."""
    prompt, chosen, rejected = asked(n)
    return {"chosen": prompt + chosen, "rejected": prompt + rejected}


def texts(n):
    """Return a row with a prompt and two answers as texts."""
    return {"prompt": f"{n}?", "chosen": f" yes {n}", "rejected": f" no {n}"}


PREFERRED = {
    "texts": (texts, texts),
    "messages": (explicit, explicit),
    "whole conversations": (implicit, implicit),
    "whole conversations with a prompt": (lambda n: implicit(n) | {"prompt": f"{n}?"}, implicit),
    "a text with answers of messages": (lambda n: explicit(n) | {"prompt": f"{n}?"}, explicit),
    "sharegpt": (
        lambda n: {
            "conversations": as_sharegpt(asked(n)[0]),
            "chosen": as_sharegpt(asked(n)[1])[0],
            "rejected": as_sharegpt(asked(n)[2])[0],
        },
        explicit,
    ),
    "alpaca": (
        lambda n: {"instruction": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"},
        explicit,
    ),
}
"""By form of rows: a row of a user, and the same row as TRL documents it."""


def stock(task, rows, tokenizer, folder, **settings):
    """Return TRL's own trainer with a small model and the rows that TRL gets."""
    kind, config = TRAINERS[task]
    model = make_text_model(ModelSettings(config=SMALL_LLAMA), AutoModelForCausalLM, tokenizer)
    reference = {"ref_model": copy.deepcopy(model)} if task == "preference_tuning" else {}
    return kind(
        model=model,
        args=config(
            str(folder), max_length=400, report_to="none", use_cpu=True, bf16=False, **settings
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **reference,
    )


def prepared(json_lines, task, rows, **settings):
    """Return the rows that the trainer of a recipe has prepared."""
    section = json_lines(rows) | {"eval_fraction": 0}
    return trainer_of(task, section, max_length=400, **settings).train_dataset


@pytest.mark.parametrize("form", TUNED)
def test_tuning_is_that_of_trl(json_lines, tmp_path, form):
    """Tokens and labels are those of TRL's trainer, for rows in a form that TRL documents."""
    ours, theirs, settings = TUNED[form]
    expected = stock(
        "supervised_tuning", [theirs(n) for n in range(3)], byte_tokenizer(), tmp_path, **settings
    ).train_dataset
    explicit_settings = {} if settings == WITH_ANSWERS else settings
    found = prepared(
        json_lines, "supervised_tuning", [ours(n) for n in range(3)], **explicit_settings
    )

    assert found["input_ids"][:] == expected["input_ids"][:]
    assert found["labels"][:] == expected["labels"][:]


@pytest.mark.parametrize("form", PREFERRED)
def test_preferences_are_those_of_trl(json_lines, tmp_path, form):
    """Prompts and answers are those of TRL's trainer, for rows in a form that TRL documents."""
    ours, theirs = PREFERRED[form]
    rows = [theirs(n) for n in range(3)]
    expected = stock("preference_tuning", rows, byte_tokenizer(), tmp_path).train_dataset
    found = prepared(json_lines, "preference_tuning", [ours(n) for n in range(3)])

    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert found[name][:] == expected[name][:]


TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi3": ("<|assistant|>",),
    "qwen2_5": ("<|im_start|>", "<|im_end|>"),
}
"""Control tokens of chat templates, beside those of the byte tokenizer."""

ANSWERS = {
    "chatml": ["It is 2.<|im_end|>", "3.<|im_end|>"],
    "llama3": ["It is 2.<|eot_id|>", "3.<|eot_id|>"],
    "phi3": ["It is 2.<|end|>\n", "3.<|end|>\n<|end|>"],
    "qwen2_5": ["\nIt is 2.<|im_end|>\n", "\n3.<|im_end|>\n"],
}
"""What of the conversation the model learns: the answers and their ends."""


@pytest.mark.parametrize("name", TOKENS)
def test_templates_by_name(json_lines, tmp_path, name):
    """The text is that of the template, and the answers are learned with their ends, no more."""
    folder = save_tokenizer(tmp_path / "base", *TOKENS[name])
    trainer = trainer_of(
        "supervised_tuning",
        json_lines([{"conversations": as_sharegpt(added(1))}] * 2) | {"eval_fraction": 0},
        model=LANGUAGE | {"tokenizer": folder, "chat_template": name},
        max_length=400,
    )
    tokenizer = trainer.processing_class
    row = trainer.train_dataset[0]

    text = tokenizer.apply_chat_template(added(1), tokenize=False)
    assert tokenizer.decode(row["input_ids"]) == text
    assert learned(tokenizer, row) == ANSWERS[name]


def test_without_a_template_alpaca_is_its_own_text(json_lines, tmp_path):
    """The prompt is the published text, and the answer follows it without a space."""
    folder = save_tokenizer(tmp_path / "base")
    rows = [{"instruction": "Add.", "input": f"{n} and 1", "output": f"{n + 1}"} for n in range(3)]
    theirs = [{"prompt": ALPACA.format(n=n), "completion": f"{n + 1}"} for n in range(3)]
    tokenizer = byte_tokenizer()
    found = prepared(json_lines, "supervised_tuning", rows, model=LANGUAGE | {"tokenizer": folder})
    expected = stock("supervised_tuning", theirs, tokenizer, tmp_path).train_dataset

    assert found["input_ids"][:] == expected["input_ids"][:]
    assert found["labels"][:] == expected["labels"][:]
    assert learned(tokenizer, found[1]) == ["2<|end|>"]


def test_tools_reach_the_template(json_lines, tmp_path):
    """The column ``tools`` is rendered, and calls of tools are learned."""
    folder = save_tokenizer(tmp_path / "base", *TOKENS["qwen2_5"])
    function = {"name": "add", "arguments": {"a": 1}}
    turns = [
        said("user", "1+1?"),
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        said("tool", "2"),
        said("assistant", "It is 2."),
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds numbers."}}]
    trainer = trainer_of(
        "supervised_tuning",
        json_lines([{"messages": turns, "tools": str(tools).replace("'", '"')}] * 2),
        model=LANGUAGE | {"tokenizer": folder, "chat_template": "qwen2_5"},
        max_length=2000,
    )
    tokenizer, row = trainer.processing_class, trainer.train_dataset[0]

    assert "Adds numbers." in tokenizer.decode(row["input_ids"])
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    assert learned(tokenizer, row) == [call, "\nIt is 2.<|im_end|>\n"]


@pytest.mark.parametrize("strategy", ["wrapped", "bfd"])
@pytest.mark.parametrize("form", ["sharegpt", "alpaca"])
def test_packed_answers(json_lines, form, strategy):
    """Packing keeps the mask: the learned words are those of the rows that are not packed."""
    ours, _, _ = TUNED[form]
    section = json_lines([ours(n) for n in range(20)]) | {"eval_fraction": 0}
    packing = {"packing": True, "packing_strategy": strategy}
    packed, plain = (
        trainer_of("supervised_tuning", section, max_length=200, **settings).train_dataset
        for settings in (packing, {})
    )

    def number(rows):
        return sum(label != -100 for row in rows for label in row["labels"])

    assert len(packed) < len(plain) == 20
    assert number(packed) == number(plain) > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_are_kept_apart(json_lines, attention):
    """Without FlashAttention, too, the loss of packed rows is that of the single rows."""
    rows = [{"prompt": f"{n} and", "completion": f" {n + 1}" * (n + 1)} for n in range(6)]
    data = json_lines(rows) | {"eval_fraction": 0.5}
    settings = {"max_length": 256, "per_device_eval_batch_size": 8}
    packed, plain = (
        trainer_of(
            "supervised_tuning",
            data,
            model=LANGUAGE | {"attn_implementation": attention},
            packing=packs,
            **settings,
        )
        for packs in (True, False)
    )
    with torch.no_grad():
        for parameter, other in zip(
            packed.model.parameters(), plain.model.parameters(), strict=True
        ):
            # Large weights, so that each token depends on those before it.
            parameter.copy_(parameter.sign() * parameter.abs().sqrt())
            other.copy_(parameter)

    assert len(packed.eval_dataset) == 1 < len(plain.eval_dataset)
    losses = [trainer.evaluate()["eval_loss"] for trainer in (packed, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_held_out_rows_that_are_not_packed(json_lines):
    """With ``eval_packing: false``, they are those of a run without packing, in the same order."""
    rows = [{"prompt": f"{n} and", "completion": f" {n + 1}" * (n % 3 + 1)} for n in range(8)]
    data = json_lines(rows) | {"eval_fraction": 0.5}
    plain, packed = (
        trainer_of("supervised_tuning", data, max_length=64, **packing).eval_dataset["input_ids"][:]
        for packing in ({}, {"packing": True, "eval_packing": False})
    )

    assert len(plain) == 4
    assert packed == plain


def test_converted_rows_keep_their_source(json_lines):
    """Rows that are converted still name where they come from."""
    names = ["web", "books"] * 4
    rows = [{"conversations": as_sharegpt(added(n)), "site": name} for n, name in enumerate(names)]
    section = json_lines(rows) | {"eval_fraction": 0, "loss_by": "site"}
    trainer = trainer_of("supervised_tuning", section, max_length=400)
    trainer.loss_by_row.prepare()

    assert [trainer.loss_by_row.source_of(index) for index in range(8)] == names


def test_streamed_conversations(json_lines):
    """ShareGPT rows of a stream are converted as they are read."""
    file = json_lines([{"conversations": as_sharegpt(added(n))} for n in range(8)])["path"]
    section = {"type": "datasets", "path": "json", "data_files": file, "streaming": True}
    trainer = trainer_of("supervised_tuning", section, max_length=400, max_steps=1)

    assert targets(trainer)[1] == f"It is 2.{ENDS}3.{ENDS}"


def test_prompts_are_masked(json_lines):
    """With prompt and completion, only the completion is a target."""
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {n + n}"} for n in range(8)]
    trainer = trainer_of("supervised_tuning", json_lines(rows), max_length=32)

    assert set(targets(trainer)) <= {f" {n + n}{ENDS}" for n in range(8)}


def test_without_a_mask_prompts_are_predicted_too(json_lines):
    """With ``completion_only_loss: false`` prompts are targets, too."""
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {n + n}"} for n in range(8)]
    section = json_lines(rows)
    trainer = trainer_of("supervised_tuning", section, max_length=32, completion_only_loss=False)

    assert all(" and " in text for text in targets(trainer))


def test_the_assistants_words_alone(json_lines):
    """With ``assistant_only_loss``, only the assistant's replies are targets."""
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": f"{n}+{n}?"},
                {"role": "assistant", "content": f"It is {n + n}."},
            ]
        }
        for n in range(8)
    ]
    section = json_lines(rows)
    trainer = trainer_of("supervised_tuning", section, max_length=64, assistant_only_loss=True)
    inputs = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])

    assert inputs.startswith("<|system|>Add.<|reply|><|user|>")
    assert set(targets(trainer)) <= {f"It is {n + n}.{ENDS}" for n in range(8)}


def test_prompts_come_before_messages(json_lines):
    """Of data with both, prompt and completion are used, where only the completion counts."""
    turn = {"role": "user", "content": "not used"}
    rows = [{"prompt": f"{n}?", "completion": "yes", "messages": [turn, turn]} for n in range(8)]
    trainer = trainer_of("supervised_tuning", json_lines(rows), max_length=32)

    assert set(targets(trainer)) == {f"yes{ENDS}"}


def test_the_assistants_words_need_messages(json_lines):
    """With prompts or texts, `assistant_only_loss` is an error that names the key and its line."""
    section = json_lines([{"prompt": "a", "completion": "b"}] * 8)
    says = r"^r:\d+: training\.assistant_only_loss: expected false, because"
    with pytest.raises(RecipeError, match=says):
        trainer_of("supervised_tuning", section, max_length=32, assistant_only_loss=True)


def test_trl_packs(json_lines):
    """``training.packing`` joins texts into sequences of equal length."""
    rows = [{"text": f"text number {n}"} for n in range(40)]
    section = json_lines(rows)
    strategy = {"packing": True, "packing_strategy": "wrapped", "max_length": 48}
    packed = trainer_of("supervised_tuning", section, **strategy)
    plain = trainer_of("supervised_tuning", section, max_length=48)
    lengths = [len(row["input_ids"]) for row in packed.train_dataset]

    assert set(lengths[:-1]) == {48}
    assert sum(lengths) == sum(len(row["input_ids"]) for row in plain.train_dataset)


def test_an_adapter_alone_is_trained(json_lines):
    """With ``peft``, only the adapter is trained."""
    rows = [{"prompt": "a", "completion": "b"}] * 8
    trainer = trainer_of(
        "supervised_tuning", json_lines(rows), "peft={type: lora, r: 2, target_modules: [q_proj]}"
    )
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]

    assert trained
    assert all("lora_" in name for name in trained)


def test_preferences_begin_from_the_reference(json_lines):
    """Preference tuning starts with a reference model that has the same weights."""
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8
    trainer = trainer_of("preference_tuning", json_lines(rows), max_length=16, beta=0.1)
    pairs = list(zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True))

    assert pairs
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert all(theirs is not ours for ours, theirs in pairs)
    assert not trainer.ref_model.training
