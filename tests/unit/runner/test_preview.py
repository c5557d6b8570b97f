"""The preview shows rows as the model gets them, with the tokens that count in the loss."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import ViTConfig, ViTForImageClassification

from mfwrap.runner import RecipeError
from mfwrap.runner.preview import preview
from support.recipe_data import recipe_of, trainer_of
from support.recipe_texts import BERT, PERCEPTRON, VIT

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {key: size for key, size in VIT["config"].items() if key != "model_type"} | {
    "image_size": 8
}


@pytest.fixture
def file(tmp_path):
    """Return a function that writes rows to a file, and returns the section ``data``."""

    def write(*rows, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return {"path": str(path), "eval_fraction": 0, **keys}

    return write


def test_a_language_model(file):
    """All tokens of a text count except the first, which nothing predicts; padding is counted."""
    lines = preview(recipe_of("causal_lm", file({"text": "one\ntwo"}, {"text": "abc"})))

    assert lines == [
        "sequence 1: 8 tokens, 7 of them count in the loss",
        r"  in the loss      one\ntwo<|end|>",
        "",
        "sequence 2: 4 tokens, 3 of them count in the loss, 4 tokens of padding",
        "  in the loss      abc<|end|>",
        "",
        "as one batch: input_ids (2, 8), attention_mask (2, 8), labels (2, 8)",
    ]


def test_prompts_are_masked(file):
    """The prompt does not count in the loss, the completion does."""
    rows = [{"prompt": "Is it?", "completion": " Yes."}]
    lines = preview(recipe_of("supervised_tuning", file(*rows), max_length=64))

    assert lines[:5] == [
        (
            "1 row of prompts and completions; the completions count in the loss; no chat template "
            "is applied to prompts that are texts; data.columns={instruction: prompt, output: "
            "completion} would apply it"
        ),
        "",
        "sequence 1: 12 tokens, 6 of them count in the loss",
        "  not in the loss  Is it?",
        "  in the loss      \N{OPEN BOX}Yes.<|end|>",
    ]


def test_packed_rows(file):
    """Each sequence is shown as long as it is, by its rows; the collator joins all of them."""
    rows = [{"prompt": "Is it?", "completion": " " + "yes" * number} for number in range(1, 5)]
    recipe = recipe_of("supervised_tuning", file(*rows), max_length=32, packing=True)
    lines = preview(recipe, 2)

    assert "the 4 rows fill 2 sequences of 32 tokens" in lines
    assert [line for line in lines if line.startswith("sequence")] == [
        "sequence 1, row 1 of 2: 20 tokens, 14 of them count in the loss",
        "sequence 1, row 2 of 2: 11 tokens, 5 of them count in the loss",
        "sequence 2, row 1 of 2: 17 tokens, 11 of them count in the loss",
        "sequence 2, row 2 of 2: 14 tokens, 8 of them count in the loss",
    ]
    assert lines[-1].startswith("as one batch: input_ids (1, 62)")


def test_rows_without_padding(file):
    """The collator joins rows that are not packed, too."""
    rows = [{"prompt": "Is it?", "completion": " Yes."}] * 2
    recipe = recipe_of("supervised_tuning", file(*rows), padding_free=True, max_length=None)
    lines = preview(recipe)

    title = "row 1 of 1: 12 tokens, 6 of them count in the loss"
    for number in (1, 2):
        assert f"sequence {number}, {title}" in lines
    assert lines[-1].startswith("as one batch: input_ids (1, 24)")


def test_spaces_at_the_ends(file):
    """A space that a reader would not see is marked; spaces between words are not."""
    rows = [{"prompt": " Is  it? ", "completion": "  "}, {"prompt": "a", "completion": "b"}]
    lines = preview(recipe_of("supervised_tuning", file(*rows), max_length=64))
    mark = "\N{OPEN BOX}"

    assert f"  not in the loss  {mark}Is  it?{mark}" in lines
    assert f"  in the loss      {mark * 2}<|end|>" in lines


@pytest.mark.parametrize("number", [1, 2, 3, 40])
def test_spaces_where_a_line_is_wrapped(file, number):
    """Several are marked, in whichever of the two lines they are; one is as good as a new line."""
    words = "a" * 70 + " " * number + "b" * 70
    lines = preview(recipe_of("supervised_tuning", file({"prompt": words, "completion": "c"})))
    start = next(number for number, line in enumerate(lines) if "a" * 70 in line)
    shown = "".join(line[19:] for line in lines[start : start + 3]).partition("c")[0]

    marks = number if number > 1 else 0
    assert shown.partition("  in the")[0] == "a" * 70 + "\N{OPEN BOX}" * marks + "b" * 70


def test_the_turns_of_a_conversation(file):
    """Only the words of the assistant count; many turns are left out before the last ones."""
    turns = [
        {"role": role, "content": f"{role} {n}"} for n in range(6) for role in ("user", "assistant")
    ]
    lines = preview(recipe_of("supervised_tuning", file({"messages": turns}), max_length=1000))

    assert lines[3:5] == [
        "  not in the loss  <|user|>user 0<|reply|>",
        "  in the loss      assistant 0<|end|>",
    ]
    assert lines[9:12] == [
        "  ... 4 more parts",
        "  not in the loss  <|user|>user 5<|reply|>",
        "  in the loss      assistant 5<|end|>",
    ]


def test_pairs_of_answers(file):
    """A preferred answer is followed by the rejected one of the same prompt."""
    rows = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(2)]
    lines = preview(recipe_of("preference_tuning", file(*rows), max_length=64))

    assert [line.partition(":")[0] for line in lines if line.startswith("pair")] == [
        "pair 1, preferred", "pair 1, rejected", "pair 2, preferred", "pair 2, rejected",
    ]  # fmt: skip
    assert [line for line in lines if line.startswith("  in the loss")] == [
        f"  in the loss      {answer} {n}<|end|>" for n in range(2) for answer in ("yes", "no")
    ]


def test_texts_with_a_class(file):
    """A text that is too long is cut as for the model, and the class has its name."""
    rows = [{"text": "abcdefgh", "label": "good"}, {"text": "ab", "label": "bad"}]
    section = file(*rows, sequence_length=6)
    lines = preview(recipe_of("sequence_classification", section, model=BERT))

    assert lines[:7] == [
        "sequence 1: 6 tokens",
        "  text             abcdef",
        "  label            good",
        "",
        "sequence 2: 2 tokens, 4 tokens of padding",
        "  text             ab",
        "  label            bad",
    ]


def test_words_with_classes(file):
    """Each word is shown with its class; only the first token of a word counts."""
    rows = [{"tokens": ["two", "=", "2"], "labels": ["name", "sign", "number"]}] * 2
    lines = preview(recipe_of("token_classification", file(*rows), model=BERT), 1)

    assert lines[:2] == [
        "sequence 1: 5 tokens, 3 of them count in the loss",
        "  words            two [name], = [sign], 2 [number]",
    ]


def test_images_and_tables(file):
    """For images and tables, the lines have the values, and the class or the target."""
    images = preview(recipe_of("image_classification", {"type": "digits"}, model=VIT), 2)
    section = file({"features": [1.5, -2], "target": 0.25}, {"features": [0, 0], "target": 1})
    table = preview(recipe_of("regression", section, model=PERCEPTRON), 1)

    assert images[1].startswith("  image            1 x 8 x 8 values from -1 to 1, mean -0.")
    assert images[2].startswith("  label            ")
    assert images[-1] == "as one batch: pixel_values (2, 1, 8, 8), labels (2,)"
    assert table == [
        "row 1",
        "  features         1.5, -2",
        "  target           0.25",
        "",
        "as one batch: features (1, 2), labels (1,)",
    ]


def test_images_for_a_checkpoint(tmp_path):
    """A checkpoint for images has no tokenizer; other numbers of the classes show nothing else."""
    config = ViTConfig(**SIZES, num_channels=1, id2label={n: str(9 - n) for n in range(10)})
    ViTForImageClassification(config).save_pretrained(tmp_path)
    models = ({"path": str(tmp_path)}, VIT)
    shown = [
        preview(recipe_of("image_classification", {"type": "digits"}, model=model), 5)
        for model in models
    ]

    assert shown[0] == shown[1]
    assert len({line for line in shown[0] if "  label  " in line}) > 1


def test_held_out_rows(file):
    """Held-out rows are shown where there are some; otherwise the error says so."""
    section = file({"text": "abc"}, {"text": "abd"})
    held_out = preview(recipe_of("causal_lm", section | {"eval_fraction": 0.5}), held_out=True)

    assert len(held_out) == 4
    with pytest.raises(RecipeError, match=r"r:\d+: data: expected held-out rows to show, got none"):
        preview(recipe_of("causal_lm", section), held_out=True)


@pytest.mark.parametrize("task", ["causal_lm", "supervised_tuning"])
def test_no_weights_are_loaded(file, tmp_path, task):
    """The weights of a checkpoint are not read, so that a preview of a large model is quick."""
    checkpoint = tmp_path / "checkpoint"
    trainer = trainer_of("causal_lm", {"type": "python_topics", "max_train_samples": 4})
    trainer.save_model(str(checkpoint))
    # Loading this tensor would fail, because its shape is wrong.
    wrong = {"model.embed_tokens.weight": torch.zeros(1)}
    save_file(wrong, checkpoint / "model.safetensors", {"format": "pt"})
    state = torch.get_rng_state()
    lines = preview(recipe_of(task, file({"text": "abc"}), model={"path": str(checkpoint)}))

    assert "  in the loss      abc<|end|>" in lines
    assert torch.equal(state, torch.get_rng_state())


def test_a_row_that_does_not_fit(file):
    """A fault in any row is an error, also in a row that is not shown."""
    rows = [*({"text": "a"} for _ in range(9)), {"text": None}]
    with pytest.raises(RecipeError, match=r"got an empty value \(null\) in row 10"):
        preview(recipe_of("causal_lm", file(*rows)), 1)


def test_long_parts_are_cut(file):
    """A part is cut after 400 characters, and no line is wider than 100 characters."""
    section = file({"text": "word " * 400}, sequence_length=4000)
    lines = preview(recipe_of("causal_lm", section))

    assert "(1,607 more characters)" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("task", ["causal_lm", "supervised_tuning"])
def test_a_model_that_is_not_there(file, monkeypatch, task):
    """The key of the user is named: some previews build a stand-in for the model, which has all."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expected = (
        r"r:\d+: model\.path: must name what can be loaded; there is no folder 'my_modl' here"
    )
    with pytest.raises(RecipeError, match=expected):
        preview(recipe_of(task, file({"text": "a"}), model={"path": "my_modl"}))
