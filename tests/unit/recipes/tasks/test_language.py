"""Language tasks cut, pack and mask texts, and train weights or adapters."""

import re

import pytest
import torch

from mfwrap.runner import RecipeError
from support.recipe_data import LANGUAGE, trainer_of

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")
ENDS = "<|end|>"


def targets(trainer) -> list[str]:
    """Return the target texts of the rows of the first batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    decode = trainer.processing_class.decode
    labels = batch["labels"].tolist()
    return [decode([token for token in row if token != -100]) for row in labels]


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


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("template", [False, True])
def test_sources_of_pieces(json_lines, packing, template):
    """Pieces keep their order and their source; with packing, none is of two sources."""
    names = ["web", "books", "web"] * 4
    rows = [
        {"text": letter * 20, "instruction": letter, "output": letter, "site": name}
        for letter, name in zip("ABCDEFGHIJKL", names, strict=True)
    ]
    section = json_lines(rows) | {"eval_fraction": 0, "loss_by": "site", "packing": packing}
    section |= {"template": "alpaca", "separate_texts": False} if template and packing else {}
    section |= {"template": "alpaca"} if template else {}
    section["sequence_length"] = 600 if template else 16
    model = LANGUAGE | {"config": LANGUAGE["config"] | {"max_position_embeddings": 1024}}
    trainer = trainer_of("causal_lm", section, model=model)
    plain = trainer_of("causal_lm", section | {"loss_by": None}, model=model)

    trainer.loss_by_row.prepare()
    texts = [trainer.processing_class.decode(row["input_ids"]) for row in trainer.train_dataset]
    sources = [trainer.loss_by_row.source_of(index) for index in range(len(texts))]
    of_letter = dict(zip("ABCDEFGHIJKL", names, strict=True))
    for text, source in zip(texts, sources, strict=True):
        found = set(re.findall(r"ASSISTANT: (\w)<", text) if template else text) & set(of_letter)
        assert {of_letter[letter] for letter in found} == {source}
    if not packing:
        assert trainer.train_dataset["input_ids"][:] == plain.train_dataset["input_ids"][:]


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


@pytest.mark.parametrize("packing", [False, True])
def test_causal_lm_packs(json_lines, packing):
    """With ``data.packing`` texts are joined and cut; otherwise each text is cut separately."""
    texts = ["a" * 20, "b" * 50, "c" * 7, "d" * 33]
    section = json_lines([{"text": text} for text in texts]) | {
        "eval_fraction": 0,
        "sequence_length": 16,
        "packing": packing,
    }
    rows = trainer_of("causal_lm", section).train_dataset["input_ids"]
    lengths = [len(row) for row in rows]

    if packing:
        # An end token is added to each text. The remainder after the last full piece is dropped.
        assert lengths == [16] * (sum(len(text) + 1 for text in texts) // 16)
    else:
        assert lengths == [16, 5, 16, 16, 16, 3, 8, 16, 16, 2]


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


INSTRUCTIONS = [{"instruction": f"Say {n}.", "output": f"{n}."} for n in range(8)]
GPT2 = {"config": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}}


def test_answers_are_learned(json_lines):
    """With a template, the answer alone is a target, and texts of a row begin at position 0."""
    section = json_lines(INSTRUCTIONS) | {"template": "alpaca", "sequence_length": 900}
    trainer = trainer_of("causal_lm", section)
    assert set(targets(trainer)) <= {f"ASSISTANT: {n}.</s>" for n in range(8)}

    packed = trainer_of("causal_lm", section | {"packing": True})
    row = packed.train_dataset[0]
    assert row["position_ids"].count(0) == 3  # two texts and the padding
    assert len(packed.train_dataset) * 2 == len(trainer.train_dataset)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"separate_texts": True}, "separate_texts: needs `template` and `packing`"),
        ({"template": None, "targets": "next_token"}, "targets: needs `template`"),
        ({"template": "llama"}, "template: expected 'alpaca'"),
    ],
)
def test_keys_of_a_template(json_lines, changes, says):
    """A key that would have no effect is an error."""
    with pytest.raises(RecipeError, match=says):
        trainer_of("causal_lm", json_lines(INSTRUCTIONS) | {"template": "alpaca"} | changes)


def test_models_that_cannot_keep_texts_apart(json_lines):
    """Such a model needs ``separate_texts: false``, because positions do not tell it the texts."""
    section = json_lines(INSTRUCTIONS) | {"template": "alpaca", "packing": True}
    model = GPT2 | {"tokenizer": "bytes"}
    with pytest.raises(
        RecipeError, match="packing: needs `separate_texts: false` for the model type"
    ):
        trainer_of("causal_lm", section, model=model)
    trainer_of("causal_lm", section | {"separate_texts": False}, model=model)


def test_rows_of_a_stream_have_no_template(json_lines):
    """Texts are packed before the training, so they cannot be read while it goes on."""
    section = {"type": "datasets", "path": "json", "data_files": json_lines(INSTRUCTIONS)["path"]}
    section |= {"streaming": True, "template": "alpaca"}
    with pytest.raises(RecipeError, match="template: needs rows that are not streamed"):
        trainer_of("causal_lm", section, max_steps=1)
