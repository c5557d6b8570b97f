"""Count of floating-point operations, compared with the stock Trainer's."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTModel,
)

from mfwrap.trainer import MFTrainer
from mfwrap.trainer.operations import OperationCount


def arguments(folder):
    """Return settings of a trainer that does not train."""
    return TrainingArguments(str(folder), report_to="none", use_cpu=True)


def llama():
    """Return a small Llama."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def vit():
    """Return a small ViT."""
    return ViTModel(
        ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
        )
    )


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (
            llama,
            [{"input_ids": torch.zeros(*shape, dtype=torch.long)} for shape in [(2, 5), (3, 7)]],
        ),
        (vit, [{"pixel_values": torch.zeros(n, 3, 8, 8)} for n in (1, 4)]),
        (llama, [{"labels": torch.zeros(2, 2)}, {"input_ids": torch.zeros(0, 5)}]),
    ],
    ids=["tokens", "images", "no input"],
)
def test_operations_are_those_of_the_stock_trainer(model, batches, tmp_path):
    """Each micro-batch has the operations that the stock Trainer counts."""
    network = model()
    trainers = [kind(network, arguments(tmp_path)) for kind in (Trainer, MFTrainer)]

    for batch in batches:
        stock, ours = (trainer.floating_point_ops(batch) for trainer in trainers)
        assert ours == stock
        assert isinstance(ours, int)


def test_parameters_are_counted_once_in_a_training(tmp_path, monkeypatch):
    """The modules are looked through once, and again in the next training."""
    calls = []
    count = LlamaForCausalLM.num_parameters

    def counting(self, **keywords):
        calls.append(keywords)
        return count(self, **keywords)

    trainer = MFTrainer(llama(), arguments(tmp_path))
    monkeypatch.setattr(LlamaForCausalLM, "num_parameters", counting)
    batch = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    for _ in range(3):
        trainer.floating_point_ops(batch)
    assert len(calls) == 1
    trainer._operations.restart()
    trainer.floating_point_ops(batch)

    assert len(calls) == 2


def test_a_formula_of_a_subclass_is_asked_each_time():
    """A count that is not the Trainer's own may depend on more than the number of elements."""
    answers = iter([1.0, 5.0])
    count = OperationCount()
    batch = {"input_ids": torch.zeros(2, 2)}

    assert [count(lambda _: next(answers), llama(), batch) for _ in range(2)] == [1.0, 5.0]
