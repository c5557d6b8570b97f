"""Trainers that save, load and describe models in ways of their own do so with the mixin, too."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback
from mfwrap.checkpoints.written_files import LIST
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from support.other_trainers import sentence_encoder
from support.trainer_runs import (
    Run,
    assert_same_log,
    assert_same_weights,
    new_trainer,
    tiny_llama,
    train,
)

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0}


class Outer(nn.Module):
    """A network with a model of transformers in it, and a frozen weight."""

    _keys_to_ignore_on_save = None  # the Trainer asks for it if a checkpoint lacks weights

    def __init__(self, width=4) -> None:
        super().__init__()
        self.inner = tiny_llama()
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        nn.init.ones_(self.frozen.weight)
        nn.init.zeros_(self.frozen.bias)

    def forward(self, input_ids, attention_mask=None, labels=None):
        """Return the loss of the inner model."""
        out = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        return {"loss": out["loss"] * self.frozen.weight.mean()}


class OwnLayout(Trainer):
    """A trainer that saves and loads an inner model, with one argument."""

    def _save(self, output_dir=None, state_dict=None):
        self.model.inner.save_pretrained(output_dir)

    def _load_from_checkpoint(self, checkpoint_path):
        weights = load_file(Path(checkpoint_path, "model.safetensors"))
        self.model.inner.load_state_dict(weights, strict=False)


class WithoutFrozen(Trainer):
    """A trainer that saves trained weights only, and something else."""

    def _save(self, output_dir=None, state_dict=None):
        Path(output_dir).mkdir(exist_ok=True)
        weights = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        save_file(weights | {"step": torch.ones(1)}, Path(output_dir, "model.safetensors"))


class OwnOptimizerFile(Trainer):
    """A trainer that saves its optimizer in a form of its own."""

    def _save_optimizer_and_scheduler(self, output_dir):
        torch.save([self.optimizer.state_dict()], Path(output_dir, "optimizer.pt"))
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            (state,) = torch.load(Path(checkpoint, "optimizer.pt"))
            self.optimizer.load_state_dict(state)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt")))


class OwnFolder(Trainer):
    """A trainer that writes its checkpoints itself."""

    def _save_checkpoint(self, model, trial):
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        self.save_model(str(folder), _internal_call=True)
        self._save_optimizer_and_scheduler(str(folder))
        self._save_scaler(str(folder))
        self._save_rng_state(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))


class OwnNames(OwnFolder):
    """A trainer that writes further files beside its checkpoints."""

    def _save_checkpoint(self, model, trial):
        Trainer._save_checkpoint(self, model, trial)
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial), "exported")
        folder.mkdir(exist_ok=True)
        Path(folder, f"{step}.txt").write_text("exported", encoding="utf-8")
        Path(self._get_output_dir(trial), "newest.txt").write_text(str(step), encoding="utf-8")


class OwnLog(OwnFolder):
    """A trainer that appends to a file, and sets a link, beside its checkpoints."""

    def _save_checkpoint(self, model, trial):
        Trainer._save_checkpoint(self, model, trial)
        folder = Path(self._get_output_dir(trial))
        with (folder / "saves.log").open("a", encoding="utf-8") as file:
            file.write(f"{self.state.global_step}\n")
        latest = folder / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(f"checkpoint-{self.state.global_step}")


class Killed(Exception):  # noqa: N818  (stands for a kill, not for an error)
    """Stands for a kill."""


class KilledFolder(OwnFolder):
    """A trainer that is killed after it has written the weights of a checkpoint."""

    def _save_checkpoint(self, model, trial):
        if self.state.global_step == 4:
            self.save_model(str(Path(self.args.output_dir, "checkpoint-4")))
            raise Killed
        OwnFolder._save_checkpoint(self, model, trial)


class KilledNames(OwnNames):
    """A trainer that is killed after it has written a file beside a checkpoint."""

    def _save_checkpoint(self, model, trial):
        OwnNames._save_checkpoint(self, model, trial)
        if self.state.global_step == 4:
            raise Killed


@pytest.mark.parametrize("asked_for", [None, "auto"])
def test_a_killed_save_with_files_beside_a_checkpoint(asked_for, tmp_path):
    """The files that were written to the temporary folder are in nobody's way."""
    with pytest.raises(Killed):
        new_trainer(mixed(KilledNames), tmp_path, model=Outer(), **SAVING).train()
    assert (tmp_path / "_checkpoint-4.partial" / "newest.txt").is_file()

    trainer = new_trainer(mixed(OwnNames), tmp_path, model=Outer(), **SAVING)
    trainer.train(resume_from_checkpoint=asked_for)

    assert (tmp_path / "newest.txt").read_text(encoding="utf-8") == "4"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.filterwarnings("ignore:.*; resuming from .*checkpoint-2$")
@pytest.mark.parametrize("way", ["below", "on top"])
@pytest.mark.parametrize("asked_for", [None, "auto"])
def test_a_killed_save_of_ones_own(way, asked_for, tmp_path):
    """What is left of a checkpoint that a method of the user's own writes is nobody else's."""
    with pytest.raises(Killed):
        new_trainer(WAYS[way](KilledFolder), tmp_path, model=Outer(), **SAVING).train()
    assert not list((tmp_path / "checkpoint-4").glob("mfwrap_*"))

    trainer = new_trainer(WAYS[way](OwnFolder), tmp_path, model=Outer(), **SAVING)
    trainer.train(resume_from_checkpoint=asked_for)

    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()


@pytest.mark.parametrize("way", ["stock", "below", "on top"])
def test_files_beside_a_checkpoint_stay(way, tmp_path):
    """What a ``_save_checkpoint`` writes to the run folder under another name is there."""
    kind = OwnNames if way == "stock" else WAYS[way](OwnNames)
    new_trainer(kind, tmp_path, model=Outer(), **SAVING).train()

    names = sorted(path.name for path in tmp_path.rglob("[!_]*.txt"))
    assert names == ["2.txt", "4.txt", "newest.txt"]
    assert (tmp_path / "exported").is_dir()
    assert (tmp_path / "newest.txt").read_text(encoding="utf-8") == "4"
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()
    assert {path.name for path in tmp_path.glob("_*")} == (set() if way == "stock" else {LIST})


@pytest.mark.parametrize("way", ["stock", "below", "on top"])
def test_a_log_and_a_link_beside_checkpoints(way, tmp_path):
    """A ``_save_checkpoint`` may append to a file and change a link in the run folder."""
    kind = OwnLog if way == "stock" else WAYS[way](OwnLog)
    new_trainer(kind, tmp_path, model=Outer(), **SAVING).train()

    assert (tmp_path / "saves.log").read_text(encoding="utf-8") == "2\n4\n"
    assert (tmp_path / "latest").readlink() == Path("checkpoint-4")
    for step in (2, 4):
        state = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["global_step"] == step


def mixed(kind):
    """Return a trainer with the mixin in front of a class."""
    return type(f"Mixed{kind.__name__}", (MFTrainerMixin, kind), {})


def on_top(kind):
    """Return a trainer with the methods of a class in front of `MFTrainer`."""
    methods = {name: value for name, value in vars(kind).items() if inspect.isfunction(value)}
    return type(f"OnTop{kind.__name__}", (MFTrainer,), methods)


WAYS = {"below": mixed, "on top": on_top}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [OwnLayout, WithoutFrozen, OwnOptimizerFile, OwnFolder])
def test_a_trainer_resumes_in_its_own_way(kind, way, tmp_path):
    """A resumed training gives the weights of the one that was not stopped, as with stock."""
    runs = []
    for each in (kind, WAYS[way](kind)):
        folder = tmp_path / each.__name__
        whole = train(new_trainer(each, folder, model=Outer(), **SAVING))
        resumed = train(
            new_trainer(each, folder, model=Outer(), **SAVING), resume=folder / "checkpoint-2"
        )
        assert_same_weights(whole, resumed)
        runs.append(whole)

    assert_same_weights(*runs)
    assert_same_log(*runs)


class Extra(Trainer):
    """A trainer whose methods call those of the Trainer, and write another file."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "extra.txt").write_text("extra", encoding="utf-8")


class LoadsMore(MFTrainer):
    """A trainer that loads the weights by the Trainer's method."""

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.has_loaded = True


@pytest.mark.parametrize("kind", [mixed(Extra), mixed(WithoutFrozen), LoadsMore])
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: Outer(width=5), r"frozen.bias with shape \[4\], but the network"),
        (lambda: nn.ModuleDict({"other": tiny_llama()}), "which is not in|no weight of the net"),
    ],
    ids=["shape", "names"],
)
def test_another_network_is_refused(kind, other, reason, tmp_path):
    """Weights of another network are refused before anything is loaded."""
    new_trainer(kind, tmp_path, model=Outer(), **SAVING).train()
    trainer = new_trainer(kind, tmp_path, model=other(), **SAVING)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    if kind is not LoadsMore and "frozen.weight" in before and issubclass(kind, WithoutFrozen):
        pytest.skip("the frozen weight is not saved")

    with pytest.raises(ValueError, match=reason):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


class OneArgument(Trainer):
    """A trainer that loads its best model by a method of one argument."""

    def _load_from_checkpoint(self, checkpoint_path):
        weights = load_file(Path(checkpoint_path, "model.safetensors"))
        self.model.load_state_dict(weights)

    def _load_best_model(self):
        self._load_from_checkpoint(checkpoint_path=self.state.best_model_checkpoint)


BEST = {
    **SAVING,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}
"""Settings with which the first checkpoint is the best: its loss is the highest."""


@pytest.mark.parametrize("way", WAYS)
def test_the_best_model_is_loaded_with_one_argument(way, tmp_path):
    """At the end, the model has the weights of the best checkpoint."""
    trainer = new_trainer(WAYS[way](OneArgument), tmp_path, model=Outer(), **BEST)
    trainer.train()

    best = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    weights = trainer.model.state_dict()
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert all(torch.equal(weights[name], best[name]) for name in best)


class SavesItself(Outer):
    """A network that saves itself, with the names of its state."""

    def save_pretrained(self, path):
        """Write the weights."""
        Path(path).mkdir(exist_ok=True)
        state = {name: each.clone() for name, each in self.state_dict().items()}
        save_file(state, path + "/model.safetensors")


class SavesInner(Outer):
    """A network that saves its inner model only."""

    def save_pretrained(self, path):
        """Write the inner model."""
        self.inner.save_pretrained(path)


@pytest.mark.parametrize("network", [SavesItself, SavesInner])
def test_the_average_of_a_network_that_saves_itself(network, tmp_path):
    """The average is written by the network's own method, and loaded as the best model."""
    averages = {}

    class Noting(MFTrainer):
        def _save_checkpoint(self, model, trial):
            with self.ema.swap():
                state = self.model.state_dict()
                averages[self.state.global_step] = {n: w.clone() for n, w in state.items()}
            super()._save_checkpoint(model, trial)

    trainer = new_trainer(
        Noting,
        tmp_path,
        model=network(),
        callbacks=[EMACallback()],
        extras={"ema": lambda model: ExponentialMovingAverage(model, 0.5)},
        **BEST,
    )
    trainer.train()

    assert (tmp_path / "checkpoint-4" / "ema" / "model.safetensors").is_file()
    best = averages[int(trainer.state.best_model_checkpoint.rpartition("-")[2])]
    weights = trainer.model.state_dict()
    assert all(torch.equal(weights[name], best[name]) for name in best)


WITH_OUTPUTS = True


class FewerArguments(Trainer):
    """A trainer whose methods take what its own calls give them."""

    def train(self, resume_from_checkpoint=None):
        return super().train(resume_from_checkpoint)

    def compute_loss(self, model, inputs, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * 1.5

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss, None, None


class MoreArguments(Trainer):
    """A trainer whose methods take more than those of the Trainer."""

    def train(self, resume_from_checkpoint, trial=None):
        return super().train(resume_from_checkpoint, trial)

    def training_step(self, model, inputs, num_items_in_batch=None, factor=1.0):
        return super().training_step(model, inputs, num_items_in_batch) * factor

    def compute_loss(self, model, inputs, *args, scale=1.0, **keywords):
        found = super().compute_loss(model, inputs, *args, **keywords)
        return (found[0] * scale, found[1]) if isinstance(found, tuple) else found * scale

    def evaluation_loop(self, dataloader, description, *args, **keywords):
        for batch in dataloader:
            self.prediction_step(self.model, batch, WITH_OUTPUTS, None, "note")
        return super().evaluation_loop(dataloader, description, *args, **keywords)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, note=""):
        del note
        with torch.no_grad():
            loss, _ = self.compute_loss(
                model, self._prepare_inputs(inputs), WITH_OUTPUTS, scale=2.0
            )
        return loss, None, None


class ByPosition(Trainer):
    """A trainer that asks for the output of the model by position in its training step."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss, output = self.compute_loss(model, inputs, WITH_OUTPUTS, num_items_in_batch)
        assert output["logits"].shape[:2] == inputs["labels"].shape
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [FewerArguments, MoreArguments, ByPosition])
def test_methods_with_other_arguments(kind, way, tmp_path):
    """A method gets the arguments of the call, and no others."""
    if way == "on top":  # the methods call those of the class before them by its name
        kinds = [kind, type("OnTop", (kind, MFTrainerMixin, Trainer), {})]
    else:
        kinds = [kind, mixed(kind)]
    runs = [
        train(new_trainer(each, tmp_path / each.__name__, **BEST | {"greater_is_better": False}))
        for each in kinds
    ]

    assert_same_log(*runs)
    assert_same_weights(*runs)


class Pairs:
    """A loader that gives each batch of another one twice."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield from (batch, batch)

    def __len__(self) -> int:
        return 2 * len(self.loader)


class Delegating(Pairs):
    """Such a loader with the attributes of the other one."""

    def __getattr__(self, name):
        return getattr(self.loader, name)


class Doubled(DataLoader):
    """A loader of torch's class that gives each batch twice."""

    def __init__(self, loader) -> None:
        batches = {"batch_sampler": loader.batch_sampler, "collate_fn": loader.collate_fn}
        super().__init__(loader.dataset, **batches)

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)

    def __len__(self) -> int:
        return 2 * super().__len__()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loader", [Pairs, Delegating, Doubled])
def test_a_loader_of_the_users_own(loader, way, tmp_path):
    """A resume in the middle of an epoch gets the batches as the user's loader gives them."""

    class OwnLoader(Trainer):
        def get_train_dataloader(self):
            return loader(Trainer.get_train_dataloader(self))

    kind = WAYS[way](OwnLoader)
    whole = train(new_trainer(kind, tmp_path, **SAVING, max_steps=6))
    for step in (2, 4):
        again = new_trainer(kind, tmp_path, **SAVING, max_steps=6)
        assert_same_weights(whole, train(again, resume=tmp_path / f"checkpoint-{step}"))


CARD = "---\nlibrary_name: mine\n---\n\n# My model\n"


class OwnCard(Trainer):
    """A trainer that writes a card with each model."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "README.md").write_text(CARD, encoding="utf-8")

    def create_model_card(self, *args, **keywords):
        del args, keywords


@pytest.mark.parametrize("way", WAYS)
def test_a_card_of_the_trainer_stays(way, tmp_path):
    """A card that the trainer writes in ``_save`` is not changed, at no save."""
    methods = {"_save": _save_with_card, "create_model_card": OwnCard.create_model_card}
    kind = mixed(OwnCard) if way == "below" else type("OnTop", (MFTrainer,), methods)
    trainer = new_trainer(kind, tmp_path, max_steps=1)
    trainer.train()
    for _ in range(2):
        trainer.save_model()
        trainer.create_model_card()
        assert Path(tmp_path, "README.md").read_text(encoding="utf-8") == CARD


def _save_with_card(self, output_dir=None, state_dict=None):
    MFTrainer._save(self, output_dir, state_dict)
    Path(output_dir, "README.md").write_text(CARD, encoding="utf-8")


# Methods that only a part of the Trainers have, or that end a training on purpose.
LEFT_OUT = {
    "__init__",
    "hyperparameter_search",
    "init_hf_repo",
    "push_to_hub",
}

OVERRIDABLE = sorted(
    name
    for name, value in vars(Trainer).items()
    if inspect.isfunction(value) and name not in LEFT_OUT
)
"""Methods of the installed Trainer that a subclass may override."""


def overriding(base, name, *, calls_super):
    """Return a class that overrides a method, and that calls ``super`` or the stock Trainer."""
    calls = []

    def own(self, *args, **keywords):
        calls.append(name)
        if calls_super:
            return getattr(super(kind, self), name)(*args, **keywords)
        return getattr(Trainer, name)(self, *args, **keywords)

    kind = type(base.__name__, (base,), {name: own})
    return kind, calls


def outcome(base, name, folder, *, calls_super) -> tuple[Run, Run, int]:
    """Return a whole run, a run that resumes its first checkpoint, and how often it has called."""
    kind, calls = overriding(base, name, calls_super=calls_super)
    settings = {**BEST, "greater_is_better": False, "data_seed": 1}
    whole = train(new_trainer(kind, folder, **settings))
    resumed = new_trainer(kind, folder, **settings)
    resumed = train(resumed, resume=folder / "checkpoint-2")
    return whole, resumed, len(calls)


WITHOUT_SUPER = {"create_accelerator_and_postprocess"}
"""Methods without which there is no step."""


@pytest.mark.fast_sample(6)
@pytest.mark.filterwarnings("ignore:no state of the step")  # `_save_scaler` would save it
@pytest.mark.parametrize("calls_super", [True, False], ids=["super", "stock"])
@pytest.mark.parametrize("name", OVERRIDABLE)
def test_any_method_may_be_overridden(name, calls_super, tmp_path):
    """A subclass that overrides a method trains, saves and resumes as stock does."""
    if not calls_super and name in WITHOUT_SUPER:
        kind, _ = overriding(MFTrainer, name, calls_super=False)
        with pytest.raises(TypeError, match=rf"`{name}` of MFTrainer must call `super\(\)"):
            new_trainer(kind, tmp_path)
        return
    stock, _, stock_calls = outcome(Trainer, name, tmp_path / "stock", calls_super=calls_super)
    ours, resumed, calls = outcome(MFTrainer, name, tmp_path / "ours", calls_super=calls_super)

    assert_same_log(stock, ours)
    assert_same_weights(stock, ours)
    assert_same_weights(ours, resumed, difference=0.0 if calls_super else 1e-1)
    assert (calls > 0) == (stock_calls > 0)


def encoder_run(kind, folder, resume=None, **keywords):
    """Train a sentence encoder, and return the trainer."""
    from datasets import Dataset  # noqa: PLC0415  (optional)
    from sentence_transformers import losses, training_args  # noqa: PLC0415  (optional)

    model = sentence_encoder(folder / "base")
    texts = [" ".join("abcdefgh"[(i + j) % 8] for j in range(3)) for i in range(24)]
    columns = {"anchor": texts, "positive": texts[::-1], "score": [i / 24 for i in range(24)]}
    args = training_args.SentenceTransformerTrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **BEST,
    )
    data = Dataset.from_dict(columns)
    loss = losses.CosineSimilarityLoss(model)
    trainer = kind(
        model=model, args=args, train_dataset=data, eval_dataset=data, loss=loss, **keywords
    )
    return train(trainer, resume)


@pytest.mark.filterwarnings("ignore")  # of the library about its own names
def test_a_trainer_of_sentence_transformers(tmp_path):
    """Its trainer trains, resumes and writes its card as without the mixin."""
    library = pytest.importorskip("sentence_transformers")
    kinds = [library.SentenceTransformerTrainer, mixed(library.SentenceTransformerTrainer)]
    runs, cards = [], []
    for kind in kinds:
        folder = tmp_path / kind.__name__
        folder.mkdir()
        keywords = {}
        if kind is kinds[1]:
            keywords["ema"] = lambda model: ExponentialMovingAverage(model, 0.5)
            keywords["callbacks"] = [EMACallback(evaluate=False)]
        runs.append(encoder_run(kind, folder, **keywords))
        resumed = encoder_run(kind, folder, folder / "checkpoint-2", **keywords)
        assert_same_weights(runs[-1], resumed)
        resumed.trainer.save_model(str(folder / "final"))
        cards.append((folder / "final" / "README.md").read_text(encoding="utf-8"))

    assert_same_weights(*runs)
    assert_same_log(*runs)
    titles = [[line for line in card.splitlines() if line.startswith("#")] for card in cards]
    assert titles[0] == titles[1]
    export = folder / "checkpoint-4" / "ema"
    assert (export / "modules.json").is_file()
    assert load_file(export / "mfwrap_weights.safetensors").keys() == runs[1].weights.keys()
