"""Trainers of other libraries, each with a small model that is built from a configuration."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    PrinterCallback,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

__all__ = ["OTHERS", "Other", "letters", "llama", "new_trainer", "num_letters", "sentence_encoder"]


class Other(NamedTuple):
    """A trainer class of another library, and how to build a trainer of it."""

    module: str
    """Module of the class and of the class of its arguments."""

    kind: str
    """Name of the class."""

    arguments: str
    """Name of the class of its arguments; with a module if it is elsewhere."""

    build: Callable[[Path], dict[str, Any]]
    """Function that takes a folder for files and returns keywords of the trainer."""

    options: dict[str, Any]
    """Training arguments that the trainer needs."""

    evaluates: bool = True
    """Whether the stock trainer can evaluate with the installed transformers."""

    def classes(self) -> tuple[Any, Any]:
        """Return the class of the trainer and the class of its arguments."""
        module, _, name = self.arguments.rpartition(".")
        kind = getattr(importlib.import_module(self.module), self.kind)
        return kind, getattr(importlib.import_module(module or self.module), name)


CHAT = (
    "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


def llama(kind: Any = LlamaForCausalLM, seed: int = 0) -> Any:
    """Return a small Llama, with the same weights at every call."""
    torch.manual_seed(seed)
    return kind(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_labels=1,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
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


def _letters_of_bytes() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single letters that is one of bytes, which GOLD needs."""
    tokens = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyzĠ"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))  # noqa: S106  (a word of the vocabulary, not a password)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def num_letters(completions: Any, **_: Any) -> list[float]:
    """Return the number of different letters of each completion."""
    return [float(len(set(str(completion)))) for completion in completions]


def _of_texts(
    model: Any, columns: dict[str, list[Any]], tokenizer: Any = None, **others: Any
) -> dict[str, Any]:
    data, tokenizer = Dataset.from_dict(columns), tokenizer or letters()
    tokenizer.chat_template = CHAT
    rows = data.select(range(4))
    return {
        "model": model,
        "train_dataset": data,
        "eval_dataset": rows,
        "processing_class": tokenizer,
        **others,
    }


_SENTENCES = ["hello world this is text", "another line of words here", "and a third one"] * 16
_PROMPTS = ["hello ", "another ", "words ", "some text "] * 12


def _sentences(_: Path) -> dict[str, Any]:
    return _of_texts(llama(), {"text": _SENTENCES})


def _pairs(**others: Any) -> Callable[[Path], dict[str, Any]]:
    def build(_: Path) -> dict[str, Any]:
        chosen, rejected = ["world", "day", "to you"] * 16, ["words", "old"] * 24
        columns = {"prompt": _PROMPTS, "chosen": chosen, "rejected": rejected}
        made = {name: value() for name, value in others.items()}
        return _of_texts(llama(), columns, **made)

    return build


def _triples(_: Path) -> dict[str, Any]:
    columns = {"prompt": _PROMPTS, "reference": ["earth"] * 48}
    columns |= {"chosen": ["world"] * 48, "rejected": ["words", "old"] * 24}
    return _of_texts(llama(), columns)


def _rated(_: Path) -> dict[str, Any]:
    columns = {"prompt": _PROMPTS, "completion": ["world", "words"] * 24}
    return _of_texts(llama(), columns | {"label": [True, False] * 24}, ref_model=llama())


def _rewards(_: Path) -> dict[str, Any]:
    columns = {"chosen": ["hello world", "a good day"] * 24, "rejected": ["hello words"] * 48}
    return _of_texts(llama(LlamaForSequenceClassification), columns)


def _saved_llama(folder: Path, seed: int = 0) -> Any:
    """Return a small Llama with a folder, from which a trainer loads it again."""
    llama(seed=seed).save_pretrained(folder)
    letters().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def _prompts(**others: Any) -> Callable[[Path], dict[str, Any]]:
    def build(folder: Path) -> dict[str, Any]:
        made = {name: value() for name, value in others.items()}
        return _of_texts(_saved_llama(folder), {"prompt": _PROMPTS}, **made)

    return build


def _privileged(folder: Path) -> dict[str, Any]:
    prompts = [[{"role": "user", "content": prompt}] for prompt in _PROMPTS]
    columns = {"prompt": prompts, "privileged_context": ["hints"] * 48}
    return _of_texts(_saved_llama(folder), columns)


def _messages(folder: Path, tokenizer: Any = None) -> dict[str, Any]:
    rows = [
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
        for text in _SENTENCES
    ]
    model, teacher = _saved_llama(folder), _saved_llama(folder / "teacher", seed=1)
    return _of_texts(model, {"messages": rows}, tokenizer, teacher_model=teacher)


def _translations(_: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = T5Config(
        vocab_size=32, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes
    )
    model, tokenizer = T5ForConditionalGeneration(config), letters()
    texts = {"input_ids": tokenizer(_SENTENCES)["input_ids"]}
    data = Dataset.from_dict(texts | {"labels": texts["input_ids"][::-1]})
    return {
        "model": model,
        "train_dataset": data,
        "eval_dataset": data.select(range(4)),
        "processing_class": tokenizer,
        "data_collator": DataCollatorForSeq2Seq(tokenizer, model),
        "compute_metrics": _num_generated,
    }


def _num_generated(prediction: Any) -> dict[str, float]:
    return {"generated": float((prediction.predictions > 0).sum())}


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]


def _bert(folder: Path, kind: Any, **options: Any) -> str:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(WORDS), intermediate_size=8, **sizes, **rates, **options)
    kind(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def sentence_encoder(folder: Path) -> nn.Module:
    """Return a small model of sentence-transformers.

    Args:
        folder: Folder for the files that it is built from.
    """
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415  (optional)
    from sentence_transformers.models import Pooling, Transformer  # noqa: PLC0415  (optional)

    modules = [Transformer(_bert(folder, BertModel)), Pooling(8)]
    return SentenceTransformer(modules=modules, device="cpu")


_TEXTS = [" ".join(WORDS[5 + (i + j) % 8] for j in range(3)) for i in range(24)]
_SCORED = {"anchor": _TEXTS, "positive": _TEXTS[::-1], "score": [i / 24 for i in range(24)]}


def _encoded(model: Any, loss: Any, columns: dict[str, Any]) -> dict[str, Any]:
    data = Dataset.from_dict(columns)
    return {"model": model, "train_dataset": data, "eval_dataset": data, "loss": loss}


def _sentence_encoder(folder: Path) -> dict[str, Any]:
    from sentence_transformers import losses  # noqa: PLC0415  (optional)

    model = sentence_encoder(folder)
    return _encoded(model, losses.CosineSimilarityLoss(model), _SCORED)


def _cross_encoder(folder: Path) -> dict[str, Any]:
    from sentence_transformers import CrossEncoder  # noqa: PLC0415  (optional)
    from sentence_transformers.cross_encoder import losses  # noqa: PLC0415  (optional)

    model = CrossEncoder(_bert(folder, BertForSequenceClassification, num_labels=1), device="cpu")
    return _encoded(model, losses.BinaryCrossEntropyLoss(model), _SCORED)


def _sparse_encoder(folder: Path) -> dict[str, Any]:
    from sentence_transformers import SparseEncoder  # noqa: PLC0415  (optional)
    from sentence_transformers.sparse_encoder import losses  # noqa: PLC0415  (optional)
    from sentence_transformers.sparse_encoder.models import (  # noqa: PLC0415  (optional)
        MLMTransformer,
        SpladePooling,
    )

    modules = [MLMTransformer(_bert(folder, BertForMaskedLM)), SpladePooling("max")]
    model = SparseEncoder(modules=modules, device="cpu")
    pairs = {name: _SCORED[name] for name in ("anchor", "positive")}
    ranking = losses.SparseMultipleNegativesRankingLoss(model)
    loss = losses.SpladeLoss(model, ranking, document_regularizer_weight=1e-2)
    return _encoded(model, loss, pairs)


def _multi_vector_encoder(folder: Path) -> dict[str, Any]:
    from sentence_transformers import MultiVectorEncoder  # noqa: PLC0415  (optional)
    from sentence_transformers.multi_vector_encoder import losses  # noqa: PLC0415  (optional)

    model = MultiVectorEncoder(_bert(folder, BertModel), device="cpu")
    pairs = {name: _SCORED[name] for name in ("anchor", "positive")}
    return _encoded(model, losses.MultiVectorMultipleNegativesRankingLoss(model), pairs)


_GENERATES = {"num_generations": 2, "max_completion_length": 6, "steps_per_generation": 4}
_TRL, _TRIALS = "trl", "trl.experimental"
_ENCODERS = "sentence_transformers"
_ENCODED = {"learning_rate": 1e-2}

OTHERS = {
    "Seq2Seq": Other(
        "transformers",
        "Seq2SeqTrainer",
        "Seq2SeqTrainingArguments",
        _translations,
        {"predict_with_generate": True, "generation_max_length": 8},
    ),
    "SentenceTransformer": Other(
        _ENCODERS,
        "SentenceTransformerTrainer",
        "SentenceTransformerTrainingArguments",
        _sentence_encoder,
        {},
    ),
    "CrossEncoder": Other(
        f"{_ENCODERS}.cross_encoder",
        "CrossEncoderTrainer",
        "CrossEncoderTrainingArguments",
        _cross_encoder,
        {},
    ),
    "SparseEncoder": Other(
        f"{_ENCODERS}.sparse_encoder",
        "SparseEncoderTrainer",
        "SparseEncoderTrainingArguments",
        _sparse_encoder,
        {},
    ),
    "MultiVectorEncoder": Other(
        f"{_ENCODERS}.multi_vector_encoder",
        "MultiVectorEncoderTrainer",
        "MultiVectorEncoderTrainingArguments",
        _multi_vector_encoder,
        {},
    ),
    "SFT": Other(_TRL, "SFTTrainer", "SFTConfig", _sentences, {"max_length": 32}),
    "DPO": Other(_TRL, "DPOTrainer", "DPOConfig", _pairs(ref_model=llama), {"max_length": 32}),
    "KTO": Other(_TRL, "KTOTrainer", "KTOConfig", _rated, {"max_length": 32}),
    "Reward": Other(_TRL, "RewardTrainer", "RewardConfig", _rewards, {"max_length": 32}),
    "GRPO": Other(
        _TRL, "GRPOTrainer", "GRPOConfig", _prompts(reward_funcs=lambda: num_letters), _GENERATES
    ),
    "RLOO": Other(
        _TRL, "RLOOTrainer", "RLOOConfig", _prompts(reward_funcs=lambda: num_letters), _GENERATES
    ),
    "Distillation": Other(
        f"{_TRL}.trainer.distillation_trainer",
        "DistillationTrainer",
        f"{_TRL}.trainer.distillation_config.DistillationConfig",
        _prompts(teacher_model=lambda: llama(seed=1)),
        {"max_completion_length": 6},
    ),
    "A2PO": Other(
        f"{_TRIALS}.a2po",
        "A2POTrainer",
        "A2POConfig",
        _prompts(reward_funcs=lambda: num_letters),
        {"max_completion_length": 6},
    ),
    "BEMA": Other(
        f"{_TRIALS}.bema_for_ref_model",
        "DPOTrainer",
        "trl.DPOConfig",
        _pairs(ref_model=llama),
        {"max_length": 32},
    ),
    "CPO": Other(
        f"{_TRIALS}.cpo", "CPOTrainer", "CPOConfig", _pairs(), {"max_length": 32}, evaluates=False
    ),
    "GKD": Other(f"{_TRIALS}.gkd", "GKDTrainer", "GKDConfig", _messages, {"max_new_tokens": 6}),
    "GMPO": Other(
        f"{_TRIALS}.gmpo",
        "GMPOTrainer",
        "GMPOConfig",
        _prompts(reward_funcs=lambda: num_letters),
        _GENERATES,
    ),
    "GOLD": Other(
        f"{_TRIALS}.gold",
        "GOLDTrainer",
        "GOLDConfig",
        lambda folder: _messages(folder, _letters_of_bytes()),
        {"max_completion_length": 6, "use_uld_loss": False},
    ),
    "IWOPD": Other(
        f"{_TRIALS}.iw_opd", "IWOPDTrainer", "IWOPDConfig", _messages, {"max_completion_length": 6}
    ),
    "OnlineDPO": Other(
        f"{_TRIALS}.online_dpo",
        "OnlineDPOTrainer",
        "OnlineDPOConfig",
        _prompts(reward_funcs=lambda: num_letters, ref_model=llama),
        {"max_new_tokens": 6},
        evaluates=False,
    ),
    "ORPO": Other(
        f"{_TRIALS}.orpo",
        "ORPOTrainer",
        "ORPOConfig",
        _pairs(),
        {"max_length": 32},
        evaluates=False,
    ),
    "SDFT": Other(
        f"{_TRIALS}.sdft",
        "SDFTTrainer",
        "SDFTConfig",
        _privileged,
        _GENERATES | {"distillation_topk": 8},
    ),
    "SDPO": Other(
        f"{_TRIALS}.sdpo",
        "SDPOTrainer",
        "SDPOConfig",
        lambda folder: _privileged(folder) | {"reward_funcs": num_letters},
        _GENERATES,
    ),
    "TPO": Other(f"{_TRIALS}.tpo", "TPOTrainer", "TPOConfig", _triples, {"max_length": 32}),
}
"""Trainer classes by the name of their method."""


def new_trainer(
    name: str,
    folder: Path,
    *bases: type,
    extras: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """Return a silent trainer on CPU that shares no state with earlier ones.

    Args:
        name: Key in `OTHERS`.
        folder: Folder for checkpoints.
        bases: Classes to list before the trainer class.
        extras: Further keywords of the trainer.
        arguments: Further training arguments.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    other = OTHERS[name]
    kind, settings = other.classes()
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    args = settings(str(folder), **defaults | other.options | arguments)
    mixed = type(f"Mixed{kind.__name__}", (*bases, kind), {}) if bases else kind
    trainer: Trainer = mixed(args=args, **other.build(folder / "base") | (extras or {}))
    trainer.remove_callback(PrinterCallback)
    return trainer
