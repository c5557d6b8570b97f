"""Mistakes in scripts with `MFTrainer`, each as a function of the mistake's name."""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
)

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.trainer import MFTrainer
from support.recipe_texts import BERT, SMALL_LLAMA

_TEXTS = [f"number {i} of many" for i in range(8)]
_CLASSES = [i % 2 for i in range(8)]


def _bert(**settings: Any) -> BertConfig:
    sizes = {key: value for key, value in BERT["config"].items() if key != "model_type"}
    return BertConfig(**{"vocab_size": len(byte_tokenizer()), **sizes, **settings})


def _classifier(**settings: Any) -> BertForSequenceClassification:
    return BertForSequenceClassification(_bert(**settings))


def _llama(**settings: Any) -> LlamaForCausalLM:
    sizes = {key: value for key, value in SMALL_LLAMA.items() if key != "model_type"}
    return LlamaForCausalLM(
        LlamaConfig(**{"vocab_size": len(byte_tokenizer()), **sizes, **settings})
    )


def _rows(labels: Sequence[Any] | None = _CLASSES, **columns: Sequence[Any]) -> Dataset:
    """Return tokenized texts of one length with labels."""
    tokens = byte_tokenizer()(_TEXTS, padding=True)
    rows = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
    return Dataset.from_dict(rows | ({} if labels is None else {"labels": labels}) | columns)


def _unpadded(labels: Sequence[Any]) -> Dataset:
    """Return tokens of rows of different lengths."""
    rows = [list(range(10, 14 + i)) for i in range(8)]
    masks = [[1] * len(row) for row in rows]
    return Dataset.from_dict({"input_ids": rows, "attention_mask": masks, "labels": labels})


def _train(
    model: PreTrainedModel | PeftModel,
    rows: Dataset,
    arguments: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> None:
    """Train two updates as a script does."""
    settings: dict[str, Any] = {
        "output_dir": "run",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(**settings | dict(arguments or {}))
    MFTrainer(model=model, args=args, train_dataset=rows, **keywords).train()


def model_without_head() -> None:
    _train(BertModel(_bert()), _rows())


def labels_missing() -> None:
    _train(_llama(), _rows(None))


def early_stopping_without_best_model() -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 1}
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    _train(_classifier(), _rows(), arguments, eval_dataset=_rows(), callbacks=[stopping])


def labels_are_texts() -> None:
    _train(_classifier(), _rows([("even", "odd")[i] for i in _CLASSES]))


def no_columns_match() -> None:
    _train(_llama(), Dataset.from_dict({"text": _TEXTS, "audio": _TEXTS}))


def raw_data_set() -> None:
    _train(_classifier(), Dataset.from_dict({"premise": _TEXTS, "label": _CLASSES}))


def lengths_differ() -> None:
    _train(_classifier(), _unpadded(_CLASSES), data_collator=default_data_collator)


def labels_not_padded() -> None:
    rows = _unpadded([list(range(10, 14 + i)) for i in range(8)])
    _train(_llama(), rows, data_collator=DataCollatorWithPadding(byte_tokenizer()))


def tokenizer_argument_renamed() -> None:
    _train(_classifier(), _rows(), tokenizer=byte_tokenizer())


def _without_padding() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    return tokenizer


def pad_token_missing() -> None:
    _train(_classifier(), _unpadded(_CLASSES), processing_class=_without_padding())


def too_few_classes() -> None:
    _train(_classifier(num_labels=2), _rows([i % 3 for i in range(8)]))


def label_negative() -> None:
    _train(_classifier(num_labels=2), _rows([2 * i - 1 for i in _CLASSES]))


def metric_of_logits() -> None:
    def accuracy(predicted: Any) -> dict[str, float]:
        logits, labels = predicted
        return {"accuracy": float(sum(int(a) == b for a, b in zip(logits, labels, strict=True)))}

    arguments = {"eval_strategy": "steps", "eval_steps": 1}
    _train(_classifier(), _rows(), arguments, eval_dataset=_rows(), compute_metrics=accuracy)


def eval_without_labels() -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    arguments |= {"save_steps": 1, "load_best_model_at_end": True}
    _train(_classifier(), _rows(), arguments, eval_dataset=_rows(None))


def token_added_without_embedding() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<question>", "<answer>"])
    tokens = tokenizer([f"<question>{text}<answer>" for text in _TEXTS], padding=True)
    rows = Dataset.from_dict({**tokens, "labels": tokens["input_ids"]})
    _train(_llama(), rows, processing_class=tokenizer)


def tokenizer_of_another_model() -> None:
    rows = _rows()
    _train(_classifier(vocab_size=64), rows, processing_class=byte_tokenizer())


def float_labels_for_classes() -> None:
    _train(
        _classifier(num_labels=2, problem_type="single_label_classification"),
        _rows([0.5 * i for i in range(8)]),
    )


def all_frozen() -> None:
    model = _classifier()
    for parameter in model.parameters():
        parameter.requires_grad = False
    _train(model, _rows())


def adapter_loaded_for_inference() -> None:
    adapter = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(_llama(), adapter).save_pretrained("adapter")
    rows = _rows()
    rows = rows.remove_columns("labels").add_column("labels", rows["input_ids"])
    _train(PeftModel.from_pretrained(_llama(), "adapter"), rows)


def recomputed_inputs_without_gradient() -> None:
    adapter = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(_llama(), adapter)
    rows = _rows()
    rows = rows.remove_columns("labels").add_column("labels", rows["input_ids"])
    arguments = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    }
    _train(model, rows, arguments)
