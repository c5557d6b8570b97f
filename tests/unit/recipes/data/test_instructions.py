"""Instructions and answers become the rows, targets and masks of MindFormers' handlers."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from mfwrap.recipes.data.instructions import (
    SEPARATING,
    Text,
    instruction_texts,
    model_row,
    packed_rows,
)
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from support.versions import needs

ROWS = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Name a color.", "input": "", "output": "Red is a color."},
    {"instruction": "Say yes.", "input": None, "output": "Yes."},
    {"instruction": "Count.", "output": "One, two, three."},
]
TOKENIZER = byte_tokenizer()
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. "
)
TASK = "Below is an instruction that describes a task"
CONTEXT = ", paired with an input that provides further context"
REQUEST = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"


def handled(row, length, shift):
    """Return tokens and labels of MindFormers' ``AlpacaInstructDataHandler``, one per letter."""
    given = row.get("input")
    body = TASK + (CONTEXT if given else "") + REQUEST + row["instruction"]
    body += (f"\n\n### Input:\n{given}" if given else "") + "\n\n### Response:"
    prompt = f"{SYSTEM}USER: {body} "
    answer = f"ASSISTANT: {row['output']}</s>"
    tokens = np.array([TOKENIZER(letter)["input_ids"][0] for letter in prompt + answer])
    labels = np.where(np.arange(len(tokens)) < len(prompt), -100, tokens)
    if shift:
        labels = np.append(labels[1:], -100)
    return tokens[:length].tolist(), labels[:length].tolist()


def packed_by_mindformers(rows, length):
    """Return the rows of its ``PackingHandler`` after that, as it leaves them.

    Each is tokens, labels and the ends of its texts.
    """
    result = []
    tokens, labels, ends = [], [], [0]
    for row in rows:
        ids, own = handled(row, length, shift=True)
        if len(tokens) + len(ids) > length:
            result.append((tokens, labels, ends))
            tokens, labels, ends = [], [], [0]
        tokens = tokens + ids
        labels = [*labels, *own[1:], 0]
        ends = [*ends, ends[-1] + len(ids)]
    result.append((tokens, labels, ends))
    return [
        (
            np.pad(tokens, (0, length - len(tokens)), constant_values=0),
            np.pad(labels, (0, length - len(labels)), constant_values=-100),
            ends,
        )
        for tokens, labels, ends in result
    ]


@pytest.mark.parametrize("length", [300, 700, 1000, 2000])
def test_packed_rows_and_targets(length):
    """Tokens, loss targets and texts of each row are those of the two handlers."""
    texts = instruction_texts(ROWS, TOKENIZER, length, "mindformers", packing=True)
    groups = list(packed_rows(texts, length))
    rows = [model_row(group, length, separate=True) for group in groups]
    expected = packed_by_mindformers(ROWS, length)

    assert len(rows) == len(expected)
    for row, group, (tokens, labels, ends) in zip(rows, groups, expected, strict=True):
        assert row["input_ids"][:-1] == tokens.tolist()
        assert row["labels"][1:] == labels.tolist()  # a model shifts its labels by one
        assert np.cumsum([0, *(len(text.ids) for text in group)]).tolist() == ends
        starts = [at for at, position in enumerate(row["position_ids"]) if position == 0]
        assert starts[: len(ends)] == ends  # padding is a text of its own


@pytest.mark.parametrize("length", [100, 300, 2000])
def test_rows_of_one_text(length):
    """Without packing, each row has one text, also one that is cut off."""
    texts = instruction_texts(ROWS, TOKENIZER, length, "mindformers", packing=False)
    for text, row in zip(texts, ROWS, strict=True):
        tokens, labels = handled(row, length, shift=True)
        assert (text.ids, text.targets) == (tokens, labels)
        inputs = model_row([text], length, separate=False)
        assert len(inputs["input_ids"]) == length + 1
        assert inputs["labels"][1:] == labels + [-100] * (length - len(labels))
        assert set(inputs["attention_mask"]) == {1}


def test_the_next_token_is_the_target():
    """By default each token of a packed text predicts the next one, and the last one nothing."""
    (text,) = instruction_texts(ROWS[2:3], TOKENIZER, 2000, "next_token", packing=True)
    tokens, labels = handled(ROWS[2], 2000, shift=False)

    assert text.ids == tokens
    assert text.targets == [*labels[1:], -100]
    learned = [target for target in text.targets if target != -100]
    assert TOKENIZER.decode(learned) == "ASSISTANT: Yes.</s>"


SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2, "max_position_embeddings": 64, "num_local_experts": 2,
    "num_experts": 2, "num_experts_per_tok": 1, "n_routed_experts": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "use_cache": False,
}  # fmt: skip
TEXTS = [
    Text([5, 6, 7, 8], [6, 7, 8, -100]),
    Text([9, 10, 11], [-100, 11, -100]),
    Text([12, 13, 14, 15, 16], [13, -100, 15, 16, 0]),
]


def make_model(kind):
    """Return a small model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind)
    latent = {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": 2}
    for name, value in (SIZES | (latent if kind == "deepseek_v3" else {})).items():
        if hasattr(config, name):
            setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config).eval()


def as_batch(row):
    """Return a batch of one row."""
    return {name: torch.tensor([values]) for name, values in row.items()}


OF_DEEPSEEK = needs("transformers", "5.17", "a DeepSeek-V3 of any head size")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=OF_DEEPSEEK if kind == "deepseek_v3" else [])
        for kind in sorted(SEPARATING)
    ],
)
def test_models_keep_the_texts_apart(kind):
    """The loss of a packed row is the mean over the targets of its texts, each by itself."""
    network = make_model(kind)
    loss = network(**as_batch(model_row(TEXTS, 14, separate=True))).loss
    sums, number = 0.0, 0
    for ids, targets in TEXTS:
        logits = network(input_ids=torch.tensor([ids])).logits[0]
        sums += cross_entropy(logits, torch.tensor(targets), reduction="sum").item()
        number += sum(target != -100 for target in targets)

    assert number == 8
    assert loss.item() == pytest.approx(sums / number, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_joined_texts():
    """With ``separate_texts: false``, a text attends to those before it in its row."""
    network = make_model("qwen3")
    loss = network(**as_batch(model_row(TEXTS, 14, separate=False))).loss
    ids = [one for text in TEXTS for one in text.ids]
    targets = [one for text in TEXTS for one in text.targets]
    logits = network(input_ids=torch.tensor([ids])).logits[0]

    assert loss.item() == pytest.approx(cross_entropy(logits, torch.tensor(targets)).item())
