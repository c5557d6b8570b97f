"""MFTrainerMixin works with TRL's trainers and with PEFT adapters."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.trainer import MFTrainerMixin

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


class OurSFT(MFTrainerMixin, SFTTrainer):
    """TRL's supervised fine-tuning with MindFormers' step."""


class OurDPO(MFTrainerMixin, DPOTrainer):
    """TRL's preference tuning with MindFormers' step."""


def llama() -> LlamaForCausalLM:
    """Return a small model, with the same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single letters."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocabulary |= {c: i + 3 for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  (a word of the vocabulary, not a password)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def fine_tuned(kind, folder, peft_config=None, **ours):
    """Return a trainer after fine-tuning on sentences."""
    texts = ["hello world this is text", "another line of words here"] * 20
    trainer = kind(
        model=llama(),
        args=SFTConfig(str(folder), **SETTINGS),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=letters(),
        peft_config=peft_config,
        **ours,
    )
    return trained(trainer)


def preference_tuned(kind, folder, **ours):
    """Return a trainer after preference tuning."""
    pairs = {"prompt": ["hello "] * 40, "chosen": ["world"] * 40, "rejected": ["words"] * 40}
    trainer = kind(
        model=llama(),
        ref_model=llama(),
        args=DPOConfig(str(folder), **SETTINGS),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=letters(),
        **ours,
    )
    return trained(trainer)


def trained(trainer):
    """Train and return the trainer."""
    trainer.remove_callback(PrinterCallback)
    torch.manual_seed(3)
    trainer.train()
    return trainer


def assert_equal_runs(stock, ours):
    """Fail unless losses, norms and rates agree to 1e-5 and weights to 1e-6.

    They are not bitwise equal, because the two trainers round differently when they clip.
    """
    for theirs, log in zip(stock.state.log_history, ours.state.log_history, strict=True):
        for key in {"loss", "grad_norm", "learning_rate"} & theirs.keys():
            assert log[key] == pytest.approx(theirs[key], rel=1e-5), key
    weights = zip(stock.model.parameters(), ours.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in weights) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_supervised_fine_tuning(tmp_path, scale):
    """TRL's SFTTrainer gives the same results with and without MFTrainerMixin."""
    stock = fine_tuned(SFTTrainer, tmp_path)
    ours = fine_tuned(OurSFT, tmp_path, scale_sense=scale, step=StepConfig(local_norm=True))

    assert_equal_runs(stock, ours)
    assert len(ours.attached.local_norm_names) == 21


def test_an_adapter(tmp_path):
    """With a LoRA adapter, only the adapter's weights are trained, measured and averaged."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    stock = fine_tuned(SFTTrainer, tmp_path, config)
    ours = fine_tuned(
        OurSFT,
        tmp_path,
        config,
        scale_sense=2.0**16,
        step=StepConfig(local_norm=True),
        ema=lambda model: ExponentialMovingAverage(model, 0.9),
    )

    assert_equal_runs(stock, ours)
    assert len(ours.attached.local_norm_names) == 8
    assert all("lora" in name for name, _ in ours.ema.named_averages())


def test_preference_tuning(tmp_path):
    """TRL's DPOTrainer gives the same results with and without MFTrainerMixin."""
    stock = preference_tuned(DPOTrainer, tmp_path)
    ours = preference_tuned(OurDPO, tmp_path, scale_sense=2.0**16)

    assert_equal_runs(stock, ours)
