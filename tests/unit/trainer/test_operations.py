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
from mfwrap.trainer.log import OperationCount


def arguments(folder):
    """Return settings of a trainer of a short training."""
    return TrainingArguments(
        str(folder),
        max_steps=6,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )


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
        (llama, [{"labels": torch.zeros(2, 2)}, {"input_ids": torch.zeros(0, 5)}, [{}, {}]]),
    ],
    ids=["tokens", "images", "no input"],
)
def test_operations_are_those_of_the_stock_trainer(model, batches, tmp_path):
    """Each micro-batch has the operations that the stock Trainer counts."""
    network = model()
    trainer = Trainer(network, arguments(tmp_path))
    count = OperationCount(trainer)

    assert [count(batch) for batch in batches] == list(map(trainer.floating_point_ops, batches))


def test_parameters_are_counted_once_in_a_training(tmp_path, monkeypatch):
    """The modules are looked through once, and again in the next training."""
    calls = []
    count = LlamaForCausalLM.num_parameters

    def counting(self, **keywords):
        calls.append(keywords)
        return count(self, **keywords)

    rows = [{"input_ids": torch.zeros(5), "labels": torch.zeros(5)}] * 6
    rows = [{name: row.long() for name, row in each.items()} for each in rows]
    flos = []
    for kind in (Trainer, MFTrainer):
        trainer = kind(llama(), arguments(tmp_path / kind.__name__), train_dataset=rows)
        with monkeypatch.context() as patch:
            patch.setattr(LlamaForCausalLM, "num_parameters", counting)
            trainer.train()
        flos.append(trainer.state.total_flos)
        calls.append(kind)

    assert flos[0] == flos[1] > 0
    stock, ours = calls.index(Trainer), calls.index(MFTrainer) - calls.index(Trainer) - 1
    assert stock - ours == 5  # once instead of once for each of 6 micro-batches
    assert "floating_point_ops" not in vars(trainer)


def test_a_formula_of_a_subclass_is_asked_each_time(tmp_path):
    """A count that is not the Trainer's own may depend on more than the number of elements."""
    answers = iter([1.0, 5.0])

    class Own(Trainer):
        def floating_point_ops(self, inputs):
            del inputs
            return next(answers)

    count = OperationCount(Own(llama(), arguments(tmp_path)))
    batch = {"input_ids": torch.zeros(2, 2)}

    assert [count(batch) for _ in range(2)] == [1.0, 5.0]
