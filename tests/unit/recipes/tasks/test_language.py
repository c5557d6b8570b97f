"""Language models are trained on texts that are cut and packed, and on answers."""

import re

import pytest

from mfwrap.runner import RecipeError
from support.recipe_data import LANGUAGE, targets, trainer_of

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")


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
