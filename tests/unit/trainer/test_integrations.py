"""MFTrainerMixin works with TRL's trainers and with PEFT adapters."""

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForSequenceClassification, PrinterCallback

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.trainer import MFTrainerMixin
from support.other_trainers import letters, llama, num_letters
from support.versions import COUNTS_SHIFTED

# TRL and PEFT raise warnings about their own code, which cannot be fixed here.
pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "bf16": False,
    "max_length": 32,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "log_level": "error",
}


def kinds(name):
    """Return a trainer of TRL, which is imported at its first use, and one with our step."""
    stock = getattr(trl, f"{name}Trainer")
    return stock, type(f"Our{name}", (MFTrainerMixin, stock), {})


def adapter() -> LoraConfig:
    """Return the settings of a LoRA adapter."""
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def fine_tuned(kind, folder, settings=SETTINGS, **ours):
    """Return a trainer after fine-tuning on sentences."""
    texts = ["hello world this is text", "another line of words here"] * 20
    return trained(kind, trl.SFTConfig(str(folder), **settings), {"text": texts}, **ours)


def preference_tuned(kind, folder, settings=SETTINGS, **ours):
    """Return a trainer after preference tuning."""
    pairs = {"prompt": ["hello "] * 40, "chosen": ["world"] * 40, "rejected": ["words"] * 40}
    return trained(kind, trl.DPOConfig(str(folder), **settings), pairs, ref_model=llama(), **ours)


def answer_tuned(kind, folder, settings=SETTINGS, **ours):
    """Return a trainer after tuning on answers that are rated good or bad."""
    rated = {
        "prompt": ["hello "] * 40,
        "completion": ["world", "words"] * 20,
        "label": [True, False] * 20,
    }
    return trained(kind, trl.KTOConfig(str(folder), **settings), rated, ref_model=llama(), **ours)


def reward_trained(kind, folder, settings=SETTINGS, **ours):
    """Return a trainer after the training of a reward model."""
    pairs = {"chosen": ["hello world"] * 40, "rejected": ["hello words", "some text"] * 20}
    model = llama(LlamaForSequenceClassification)
    return trained(kind, trl.RewardConfig(str(folder), **settings), pairs, model=model, **ours)


def reinforced(kind, folder, settings=SETTINGS, **ours):
    """Return a trainer after updates on its own completions, rewarded for different letters."""
    settings = {name: value for name, value in settings.items() if name != "max_length"}
    arguments = trl.GRPOConfig(str(folder), num_generations=4, max_completion_length=6, **settings)
    prompts = {"prompt": ["hello ", "another ", "words ", "some text "] * 10}
    return trained(kind, arguments, prompts, reward_funcs=num_letters, **ours)


def trained(kind, arguments, data, *, model=None, **others):
    """Return a trainer after training on the columns of `data`."""
    trainer = kind(
        model=llama() if model is None else model,
        args=arguments,
        train_dataset=Dataset.from_dict(data),
        processing_class=letters(),
        **others,
    )
    trainer.remove_callback(PrinterCallback)
    torch.manual_seed(3)
    trainer.train()
    return trainer


def assert_equal_runs(stock, ours):
    """Fail unless losses, norms and rates agree to 1e-5 and weights to 1e-6.

    They are not bitwise equal, because the two trainers round differently when they clip.
    """
    for theirs, log in zip(stock.state.log_history, ours.state.log_history, strict=True):
        for key in {"loss", "grad_norm", "learning_rate", "reward", "kl"} & theirs.keys():
            # The loss of GRPO is 0 but for rounding when a completion is used for the first time.
            assert log[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key
    assert any({"loss", "grad_norm"} <= entry.keys() for entry in stock.state.log_history)
    weights = zip(stock.model.parameters(), ours.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in weights) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_supervised_fine_tuning(tmp_path, scale):
    """TRL's SFTTrainer gives the same results with and without MFTrainerMixin."""
    kind, our_kind = kinds("SFT")
    stock = fine_tuned(kind, tmp_path)
    ours = fine_tuned(our_kind, tmp_path, scale_sense=scale, step=StepConfig(local_norm=True))

    assert_equal_runs(stock, ours)
    assert len(ours.attached.local_norm_names) == 21


def test_an_adapter(tmp_path):
    """With a LoRA adapter, only the adapter's weights are trained, measured and averaged."""
    kind, our_kind = kinds("SFT")
    stock = fine_tuned(kind, tmp_path, peft_config=adapter())
    ours = fine_tuned(
        our_kind,
        tmp_path,
        peft_config=adapter(),
        scale_sense=2.0**16,
        step=StepConfig(local_norm=True),
        ema=lambda model: ExponentialMovingAverage(model, 0.9),
    )

    assert_equal_runs(stock, ours)
    assert len(ours.attached.local_norm_names) == 8
    assert all("lora" in name for name, _ in ours.ema.named_averages())


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize(
    ("run", "name"),
    [
        pytest.param(preference_tuned, "DPO", id="DPO"),
        pytest.param(answer_tuned, "KTO", id="KTO"),
        pytest.param(reward_trained, "Reward", id="reward"),
        pytest.param(reinforced, "GRPO", id="GRPO"),
    ],
)
def test_preferences_and_rewards(run, name, tmp_path):
    """TRL's other trainers give the same results with and without MFTrainerMixin."""
    kind, our_kind = kinds(name)
    stock = run(kind, tmp_path)
    ours = run(our_kind, tmp_path, scale_sense=2.0**16)

    assert_equal_runs(stock, ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "name", "options"),
    [
        (fine_tuned, "SFT", {"packing": True, "packing_strategy": "wrapped"}),
        (fine_tuned, "SFT", {"loss_type": "dft"}),
        (fine_tuned, "SFT", {"neftune_noise_alpha": 5.0}),
        (preference_tuned, "DPO", {"loss_type": ["ipo"]}),
        (preference_tuned, "DPO", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
        (preference_tuned, "DPO", {"precompute_ref_log_probs": True}),
        (answer_tuned, "KTO", {"loss_type": "apo_zero_unpaired"}),
        (reward_trained, "Reward", {"center_rewards_coefficient": 0.1}),
        (reinforced, "GRPO", {"num_iterations": 2, "steps_per_generation": 4}),
        (reinforced, "GRPO", {"loss_type": "grpo", "scale_rewards": False}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_options_of_trl(run, name, options, tmp_path):
    """Options that change batches, losses or the reference model keep both results the same."""
    kind, our_kind = kinds(name)
    stock = run(kind, tmp_path, SETTINGS | options)
    ours = run(our_kind, tmp_path, SETTINGS | options, scale_sense=2.0**16)

    assert_equal_runs(stock, ours)


@pytest.mark.slow
def test_an_adapter_and_its_reference(tmp_path):
    """GRPO with a divergence from its reference, the model without adapter, gives equal results."""
    stock, ours = (
        reinforced(kind, tmp_path, SETTINGS | {"beta": 0.1}, peft_config=adapter(), **extras)
        for kind, extras in zip(kinds("GRPO"), ({}, {"scale_sense": 2.0**16}), strict=True)
    )

    assert_equal_runs(stock, ours)
    assert any(entry.get("kl") for entry in stock.state.log_history)


SITES = ["web", "books", "web", "code"] * 10


@COUNTS_SHIFTED
@pytest.mark.parametrize("padding_free", [False, True])
def test_loss_by_source_of_supervised_tuning(tmp_path, padding_free):
    """The head that makes no logits gives the losses of the rows; no forward pass is added."""
    _, our_kind = kinds("SFT")
    texts = ["hello world this is text", "another line of words here"] * 20
    settings = SETTINGS | ({"padding_free": True, "max_length": None} if padding_free else {})
    calls = []
    model = llama()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    ours = trained(
        our_kind,
        trl.SFTConfig(str(tmp_path), **settings),
        {"text": texts, "site": SITES},
        model=model,
        loss_by="site",
    )

    entries = [entry for entry in ours.state.log_history if "learning_rate" in entry]
    assert len(entries) == 6
    assert len(calls) == 6 * 2
    for entry in entries:
        tokens = {name: entry[f"tokens/{name}"] for name in ("web", "books", "code")}
        total = sum(n * entry[f"loss/{name}"] for name, n in tokens.items() if n)
        assert total / sum(tokens.values()) == pytest.approx(entry["loss"], rel=1e-4)


def test_loss_by_source_of_pairs_is_refused(tmp_path):
    """Preference tuning has no loss of its own for each row."""
    _, our_kind = kinds("DPO")
    with pytest.raises(ValueError, match="need"):
        preference_tuned(our_kind, tmp_path, loss_by=["web"] * 40)
