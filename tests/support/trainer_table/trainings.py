"""Run one training with the stock Trainer or with MFTrainer, and compare two trainings."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from mfwrap.trainer import MFTrainerMixin
from support.ranks.pool import RankPool
from support.trainer_runs import VOCABULARY, Counting, new_trainer, padded, tiny_llama

__all__ = [
    "Outcome",
    "best_of_three",
    "differences",
    "evaluated_on_two_ranks",
    "failing_at_first",
    "generated",
    "reloaded",
    "resumed",
    "searched",
    "trained",
    "uneven",
    "wide_llama",
]

TOLERANCE = 1e-5
"""Largest allowed difference of a number, relative to the largest magnitude of its tensor or, for a
number of the log, to the larger of its magnitude and 1."""


class Outcome(NamedTuple):
    """What a training leaves."""

    log: list[dict[str, Any]]
    """Entries of the Trainer's log."""

    tensors: dict[str, Tensor]
    """Final weights, and tensors that were predicted, by name."""

    facts: Any = None
    """Further results, which must be equal: numbers, names of files."""


def wide_llama() -> LlamaForCausalLM:
    """Return a Llama whose linear layers have 4,096 and more weights, with fixed initial weights.

    8-bit and 4-bit optimizers quantize the state of such weights, and keep smaller ones in float32.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def outcome(trainer: Trainer, facts: Any = None, **tensors: Any) -> Outcome:
    """Return the outcome of a trainer that has trained."""
    model: Any = trainer.model
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    predicted = {name: torch.as_tensor(value) for name, value in tensors.items()}
    return Outcome(trainer.state.log_history, weights | predicted, facts)


def trained(
    kind: type[Trainer],
    folder: Path,
    arguments: Mapping[str, Any],
    make: Callable[[], nn.Module] = tiny_llama,
    data: Any = None,
) -> Outcome:
    """Train, and predict with the trained model."""
    trainer = new_trainer(kind, folder, model=make(), data=data, **arguments)
    model: Any = trainer.model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    after = zip(before, model.parameters(), strict=True)
    moved = max((old - new).abs().max().item() for old, new in after)
    assert moved > 1e-4, f"the training changed weights by only {moved}"
    predicted: Any = trainer.predict(Counting(4, length=8))
    facts = {"steps": trainer.state.global_step, "tokens": trainer.state.num_input_tokens_seen}
    return outcome(trainer, facts, logits=predicted.predictions)


def uneven(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Train on 20 rows, so that the last update of an epoch has fewer micro-batches."""
    return trained(kind, folder, arguments, data=Counting(20))


def reloaded(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Train with checkpoints, and return the weights in the last one and the names of its files."""
    trainer = new_trainer(kind, folder, **arguments)
    trainer.train()
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    trainer.model = LlamaForCausalLM.from_pretrained(last)
    files = {path.name for path in last.iterdir() if not path.name.startswith("mfwrap_")}
    return outcome(trainer, {"checkpoint": last.name, "files": sorted(files)})


def resumed(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Train two of four updates, and resume in a new trainer."""
    saving = {"save_strategy": "steps", "save_steps": 2, **arguments}
    new_trainer(kind, folder, **saving).train()
    trainer = new_trainer(kind, folder, **saving)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    # The stock Trainer's mean loss leaves out the steps before the checkpoint.
    del trainer.state.log_history[-1]["train_loss"]
    return outcome(trainer)


def best_of_three(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Train with three checkpoints, of which the first one is the best."""
    when = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = new_trainer(kind, folder, max_steps=3, **when, **arguments)
    trainer.train()
    state = trainer.state
    best = Path(str(state.best_model_checkpoint)).name
    return outcome(
        trainer, {"best": best, "step": state.best_global_step}, metric=state.best_metric
    )


def evaluated_on_two_ranks(
    kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]
) -> Outcome:
    """Evaluate 11 rows in batches of 4 on two ranks, so that rows fill up the last batch."""
    folder.mkdir(parents=True, exist_ok=True)
    with RankPool(2, folder) as ranks:
        (metrics, logits, labels), _ = ranks.run(_evaluate, kind, str(folder), dict(arguments))
    # Those rows count in the stock Trainer's loss.
    del metrics["eval_loss"]
    return Outcome([{"step": 0, **metrics}], {"logits": logits, "labels": labels})


def _evaluate(
    rank: int, kind: type[Trainer], folder: str, arguments: Mapping[str, Any]
) -> tuple[dict[str, float], Tensor, Tensor]:
    del rank
    found = []

    def keep(outputs: Any) -> dict[str, float]:
        found.extend(torch.as_tensor(each) for each in (outputs.predictions, outputs.label_ids))
        return {"rows": float(len(outputs.predictions))}

    trainer = new_trainer(
        kind,
        Path(folder),
        extras={"compute_metrics": keep},
        per_device_eval_batch_size=4,
        **arguments,
    )
    data: Any = Counting(11, length=8)
    metrics = trainer.evaluate(data)
    return metrics, found[0], found[1]


def failing_at_first(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Train a model that runs out of memory with more than three rows."""
    model = tiny_llama()

    def fail(module: nn.Module, inputs: Any, keywords: dict[str, Any]) -> None:
        if module.training and len(keywords["input_ids"]) > 3:
            msg = "CUDA out of memory."
            raise RuntimeError(msg)

    model.register_forward_pre_hook(fail, with_kwargs=True)
    trainer = new_trainer(kind, folder, model=model, per_device_train_batch_size=4, **arguments)
    trainer.train()
    return outcome(trainer, {"batch size": trainer._train_batch_size})


class OurSeq2Seq(MFTrainerMixin, Seq2SeqTrainer):
    """transformers' trainer of sequence-to-sequence models with MindFormers' step."""


def generated(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Train a sequence-to-sequence model, and evaluate and predict by generating."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = T5Config(
        vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes
    )
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **arguments,
    )
    make: Any = OurSeq2Seq if issubclass(kind, MFTrainerMixin) else Seq2SeqTrainer
    trainer = make(
        model=T5ForConditionalGeneration(config),
        args=args,
        train_dataset=Counting(16, length=6),
        eval_dataset=Counting(4, length=6),
        data_collator=padded,
        compute_metrics=_hits,
    )
    trainer.train()
    predicted = trainer.predict(Counting(4, length=6), max_length=6)
    return outcome(trainer, predictions=predicted.predictions)


def _hits(found: Any) -> dict[str, float]:
    length = min(found.predictions.shape[1], found.label_ids.shape[1])
    same = found.predictions[:, :length] == found.label_ids[:, :length]
    return {"hits": float(same.mean())}


def searched(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    """Search for the best learning rate in three trials of optuna."""
    import optuna  # noqa: PLC0415  (only this row needs it)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trainer = new_trainer(kind, folder, **arguments)
    trainer.model_init = tiny_llama
    best: Any = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1)},
        n_trials=3,
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    trainer.model = tiny_llama()
    facts = {"best trial": best.run_id, "hyperparameters": best.hyperparameters}
    return outcome(trainer, facts, objective=best.objective)


_UNCOMPARED = ("_runtime", "_per_second", "_preparation_time")


def differences(stock: Outcome, ours: Outcome) -> list[str]:
    """Return what differs between two outcomes, one short phrase for each; `ours` may log more."""
    found = []
    steps = [[entry["step"] for entry in each.log] for each in (stock, ours)]
    if steps[0] != steps[1]:
        found.append(f"steps of the log: {steps[0]} and {steps[1]}")
    for expected, actual in zip(stock.log, ours.log, strict=False):
        for name, value in expected.items():
            other = actual.get(name)
            if not name.endswith(_UNCOMPARED) and not _close(value, other):
                found.append(f"`{name}` in the log at step {expected['step']}: {value} and {other}")
    if stock.tensors.keys() != ours.tensors.keys():
        found.append("names of tensors")
    for name, tensor in stock.tensors.items():
        other = ours.tensors.get(name, tensor)
        largest = max(tensor.abs().max().item(), 1e-30)
        if tensor.shape != other.shape:
            found.append(f"shape of {name}: {tensor.shape} and {other.shape}")
        elif not (apart := (tensor - other).abs().max().item()) <= TOLERANCE * largest:
            found.append(f"{name} by {apart:.1e}")
    if stock.facts != ours.facts:
        found.append(f"{stock.facts} and {ours.facts}")
    return found


def _close(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, float) or not isinstance(actual, (int, float)):
        return bool(expected == actual)
    return math.isclose(actual, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
