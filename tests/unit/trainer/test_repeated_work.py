"""What the Trainer repeats for each micro-batch is the same when it is done less often."""

import operator

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTModel,
)

from mfwrap.trainer import MFTrainer
from mfwrap.trainer.repeated_work import ListedNetwork, OperationCount, TrainMode
from support.trainer_runs import counted_labels


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


def modes(network):
    """Return whether each module is in training mode."""
    return [module.training for module in network.modules()]


def nested():
    """Return a network with modules in modules."""
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))


@pytest.mark.parametrize("make", [nested, llama])
def test_training_mode_is_set_as_by_torch(make):
    """Modules in evaluation mode, also new ones, are set to training mode."""
    network, quick = make(), TrainMode(ListedNetwork())
    calls = []
    kind = type(network)
    set_mode = kind.train

    class Counting(kind):
        def train(self, mode=True):  # noqa: FBT002  (torch's signature)
            calls.append(mode)
            return set_mode(self, mode)

    def train():
        with quick.quick(network):
            assert network.train() is network
        return modes(network)

    assert all(train())
    network.eval()
    assert all(train())
    list(network.modules())[-1].eval()
    assert all(train())
    leaf = list(network.modules())[-1]
    leaf.added = nn.Linear(1, 1).eval()
    assert all(train())
    leaf.added = nn.Linear(1, 1).eval()
    assert all(train())
    with quick.quick(network):
        assert not any(modes(network.train(False)))  # noqa: FBT003  (torch's signature)
    assert all(train())
    assert "train" not in vars(network)

    # A class with a method of its own is asked each time.
    network.__class__ = Counting
    quick = TrainMode(ListedNetwork())
    assert all(train())
    assert all(train())
    assert calls == [True, True]


def test_a_frozen_module_with_a_mode_of_its_own_is_asked():
    """A module that stays in evaluation mode by its own method does so."""

    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):  # noqa: FBT002  (torch's signature)
            del mode
            return super().train(False)  # noqa: FBT003  (torch's signature)

    network, quick = nn.Sequential(nn.Linear(2, 2), Frozen(2)), TrainMode(ListedNetwork())
    network[1].training = True
    with quick.quick(network):
        network.train()

    assert modes(network) == [True, True, False]


def test_a_callbacks_evaluation_mode_is_undone(tmp_path):
    """Modules that a callback sets to evaluation mode are trained, as by the stock Trainer."""
    seen = []

    class Evaluating(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            model.model.layers[0].eval()

        def on_step_end(self, args, state, control, model=None, **_):
            seen.append(all(modes(model)))

    rows = [{name: torch.zeros(5).long() for name in ("input_ids", "labels")}] * 6
    for kind in (Trainer, MFTrainer):
        kind(llama(), arguments(tmp_path), train_dataset=rows, callbacks=[Evaluating()]).train()

    assert seen == [True] * 12


@pytest.mark.parametrize("make", [nested, llama])
def test_listed_parameters_are_those_of_torch(make):
    """Parameters that are added, removed, replaced, shared or in new modules are in the list."""
    network, listed = make(), ListedNetwork()

    def are_listed():
        known, expected = listed.parameters(network), list(network.parameters())
        return len(known) == len(expected) and all(map(operator.is_, known, expected))

    assert are_listed()
    assert listed.parameters(network) is listed.parameters(network)
    *_, parent, leaf = network.modules()
    leaf.register_parameter("added", nn.Parameter(torch.zeros(2)))
    assert are_listed()
    leaf.added = None
    assert are_listed()
    leaf.added = nn.Parameter(torch.zeros(2))
    assert are_listed()
    leaf.added = nn.Parameter(torch.zeros(2))
    assert are_listed()
    parent.shared = leaf.added
    assert are_listed()
    del leaf.added
    assert are_listed()
    leaf.deeper = nn.Linear(2, 1)
    assert are_listed()
    network = make()
    assert are_listed()


def test_parameters_are_looked_for_once_in_a_training(tmp_path, monkeypatch):
    """Clipping lists them in the first update, and again after a callback has added some."""
    counts, updates, lent = [], [], []
    parameters = nn.Module.named_parameters

    def counting(self, *arguments, **keywords):
        counts.append(self)
        return parameters(self, *arguments, **keywords)

    class Own(MFTrainer):
        def _clip_grad_norm(self, model):
            before = len(counts)
            with monkeypatch.context() as patch:
                patch.setattr(nn.Module, "named_parameters", counting)
                norm = super()._clip_grad_norm(model)
            updates.append(len(counts) - before)
            return norm

    class Adding(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            if state.global_step == 3:
                model.added = nn.Linear(2, 2)

    class Looking(TrainerCallback):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                lent.append("parameters" in vars(trainer.model))
            return super().__getattribute__(name)

    rows = [{name: torch.zeros(5).long() for name in ("input_ids", "labels")}] * 6
    trainer = Own(llama(), arguments(tmp_path), train_dataset=rows, callbacks=[Adding()])
    trainer.add_callback(Looking())
    zeroed = []

    def zeroing(*, set_to_none=True):
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "named_parameters", counting)
            before = len(counts)
            nn.Module.zero_grad(trainer.model, set_to_none=set_to_none)
        zeroed.append((len(counts) - before, {p.grad for p in trainer.model.parameters()}))

    trainer.model.zero_grad = zeroing
    listing = []
    listed = ListedNetwork.parameters

    def listing_parameters(self, network):
        found = listed(self, network)
        listing.append(len(found))
        return found

    monkeypatch.setattr(ListedNetwork, "parameters", listing_parameters)
    trainer.train()

    assert updates == [0] * 6  # the Trainer itself looks through no module
    before_training, *of_updates = zeroed
    assert before_training == (1, {None})
    assert of_updates == [(0, {None})] * 6
    assert [n - listing[0] for n in listing[::2]] == [0, 0, 0, 2, 2, 2]
    assert set(lent) == {False}  # no callback sees a network that lists its parameters otherwise
    assert "_clip_grad_norm" not in vars(trainer)
    assert "parameters" not in vars(trainer.model)


@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
def test_targets_of_micro_batches_are_counted_once(kind, tmp_path, monkeypatch):
    """An update of 3 micro-batches counts the targets of each once, and divides by the same sum."""
    counted, given = [], []
    count = Trainer._get_num_items_in_batch

    def counting(self, batches, device):
        counted.append(len(batches))
        return count(self, batches, device)

    class Own(kind):
        def compute_loss(self, *arguments, num_items_in_batch=None, **keywords):
            given.append(num_items_in_batch.item())
            return super().compute_loss(
                *arguments, num_items_in_batch=num_items_in_batch, **keywords
            )

    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", counting)
    rows = [
        {"input_ids": torch.zeros(5).long(), "labels": torch.tensor([1] * n + [-100] * (5 - n))}
        for n in (5, 4, 3, 5, 5, 2)
    ]
    settings = arguments(tmp_path)
    settings.max_steps, settings.gradient_accumulation_steps = 2, 3
    settings.train_sampling_strategy = "sequential"
    trainer = Own(llama(), settings, train_dataset=rows)
    trainer.train()

    labels = torch.stack([row["labels"] for row in rows[:3]])
    assert given == [counted_labels(labels).ne(-100).sum()] * 6
    assert sum(counted) == 6
