"""Prompts and references are cut out of held-out rows as the loss sees them."""

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from mfwrap.callbacks.samples.generation import CUT, Generation, can_generate
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from support.small_networks import Classifier
from support.trainer_runs import messages_of, tiny_llama


def generation(model=None, tokenizer=None, **settings):
    """Return what generates with a model."""
    defaults = {"max_new_tokens": 4, "temperature": None, "seed": 0, "is_shared": False}
    model = tiny_llama() if model is None else model
    return Generation(model, tokenizer, **defaults | settings)


def row(ids, labels=None, **others):
    """Return a batch of one row."""
    batch = {"input_ids": torch.tensor([ids])}
    if labels is not None:
        batch["labels"] = torch.tensor([labels])
    return batch | others


@pytest.mark.parametrize(
    ("batch", "prompt", "reference"),
    [
        # prompt and completion
        (row([1, 2, 3, 4, 5], [-100, -100, -100, 4, 5]), "1 2 3", "4 5"),
        # turns: the first answer is the reference
        (row([1, 2, 3, 4, 5, 6], [-100, -100, 3, -100, -100, 6]), "1 2", "3"),
        # all tokens are targets: the first half is the prompt
        (row([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), "1 2", "3 4 5"),
        (row([1, 2, 3, 4], [-100, 2, 3, 4]), "1 2", "3 4"),
        # padding is neither
        (row([1, 2, 3, 4, 0, 0], [1, 2, 3, 4, -100, -100]), "1 2", "3 4"),
        (row([1, 2, 3, 0], attention_mask=torch.tensor([[1, 1, 1, 0]])), "1", "2 3"),
        # preferences of TRL
        (row([1, 2, 3, 4], completion_mask=torch.tensor([[0, 0, 1, 1]])), "1 2", "3 4"),
        # no target at all
        (row([1, 2], [-100, -100]), "1 2", None),
    ],
)
def test_rows(batch, prompt, reference):
    """What comes before the first target is the prompt."""
    found = generation().of_row(batch)

    assert (found.text, found.reference) == (prompt, reference)
    assert found.inputs["input_ids"].tolist() == [[int(one) for one in prompt.split()]]


@pytest.mark.parametrize(
    ("prompt", "text"), [("ab", "ab"), ([{"role": "user", "content": "ab"}], "user: ab")]
)
def test_rows_of_prompts(prompt, text):
    """Trainers whose collators leave rows as they are, such as TRL's for GRPO, have prompts."""
    tokenizer = byte_tokenizer()
    found = generation(tokenizer=tokenizer).of_row([{"prompt": prompt, "answer": "c"}])

    assert (found.text, found.reference) == (text, None)
    ids = found.inputs["input_ids"][0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert (tokenizer.decode(ids) == "ab") == isinstance(prompt, str)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (row([1, 2], pixel_values=torch.zeros(1, 3, 2, 2)), "whose inputs are `input_ids` alone"),
        ({"input_features": torch.zeros(1, 2)}, "whose inputs are `input_ids` alone"),
        ([{"text": "a"}], "held-out rows with `input_ids` or `prompt`"),
        ([{"prompt": "a"}], "`prompts` needs a tokenizer"),
    ],
)
def test_other_rows(batch, says):
    """Other rows are refused."""
    with pytest.raises(ValueError, match=says):
        generation().of_row(batch)


def test_messages_that_the_chat_template_refuses():
    """The roles of the prompt are named, and what the template says."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no role ' + messages[0]['role']) }}"

    with pytest.raises(
        ValueError, match=r"the roles \['bogus'\], which .* refuses: no role bogus$"
    ):
        generation(tokenizer=tokenizer).of_prompt([{"role": "bogus", "content": "ab"}])


def test_a_model_with_an_encoder():
    """The input of the encoder is the prompt, and the labels are the reference."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    task = generation(model)
    prompt = task.of_row(row([1, 2, 3], [4, 5, -100], attention_mask=torch.ones(1, 3).long()))

    assert (prompt.text, prompt.reference) == ("1 2 3", "4 5")
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert task.answer(model, prompt) == " ".join(map(str, expected[0].tolist())) + CUT


def test_prompt_and_answer_fit_the_positions():
    """A long prompt loses its beginning, so that the answer fits."""
    model = tiny_llama().eval()  # 16 positions
    model.generation_config.eos_token_id = None
    task = generation(model, max_new_tokens=6)
    prompt = task.of_row(row([*range(20)], [-100] * 18 + [18, 19]))

    assert prompt.inputs["input_ids"].tolist() == [[*range(8, 18)]]
    assert prompt.text == " ".join(map(str, range(18)))
    assert len(task.answer(model, prompt).removesuffix(CUT).split()) == 6
    short = generation(model, max_new_tokens=64)
    said = short.answer(model, short.of_row(row([1, 2, 3, 4], [-100] * 3 + [4])))
    assert len(said.removesuffix(CUT).split()) == 13


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_that_has_not_ended_is_marked(ends):
    """A token that ends a text may be the last one that is allowed."""
    model = tiny_llama().eval()
    token = int(model(torch.tensor([[1, 2]])).logits[0, -1].argmax())
    model.generation_config.eos_token_id = [token, 0] if ends else token + 1
    task = generation(model, max_new_tokens=1)
    said = task.answer(model, task.of_row(row([1, 2, 3], [-100, -100, 3])))

    assert said == (str(token) if ends else f"{token} [...]")


def test_the_settings_of_the_model_stay():
    """The model's own settings of generation are neither changed nor warned about."""
    model = tiny_llama().eval()
    model.generation_config.temperature = 0.3
    model.generation_config.do_sample = True
    model.generation_config.top_p = 0.5
    before = model.generation_config.to_dict()
    task = generation(model)
    prompt = task.of_row(row([1, 2, 3], [-100, -100, 3]))
    with messages_of("transformers") as warned:
        said = {task.answer(model, prompt) for _ in range(5)}

    assert len(said) == 1
    assert model.generation_config.to_dict() == before
    assert warned == []


def test_a_seed_draws_the_same_text():
    """Sampling draws what `generate` draws after the seed, each time."""
    model = tiny_llama().eval()
    task = generation(model, temperature=2.0, seed=3, max_new_tokens=8)
    prompt = task.of_row(row([1, 2, 3], [-100, -100, 3]))
    torch.manual_seed(3)
    ids = prompt.inputs["input_ids"]
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=2.0,
        max_new_tokens=8, pad_token_id=0,
    )  # fmt: skip

    for _ in range(2):
        said = " ".join(map(str, expected[0, 2:].tolist()))
        assert task.answer(model, prompt) == said + CUT


def test_what_can_generate():
    """A model without transformers' `generate` is recognized."""
    assert can_generate(tiny_llama())
    assert not can_generate(Classifier())
