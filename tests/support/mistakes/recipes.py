"""Mistakes in recipes and on the command line, each as a function of the mistake's name.

Each runs in an empty folder and ends as `mfwrap` does.
"""

import contextlib
import copy
import csv
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub.constants
import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from mfwrap.cli import main
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from support.hub import client_of, serving
from support.recipe_texts import BERT, SMALL_LLAMA

_TRAINING = {
    "output_dir": "run",
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
}

_CLASSIFICATION: dict[str, Any] = {
    "task": "sequence_classification",
    "model": BERT,
    "data": {"path": "rows.csv", "sequence_length": 16, "eval_fraction": 0},
    "training": _TRAINING,
}
_LANGUAGE: dict[str, Any] = {
    "task": "causal_lm",
    "model": {"config": SMALL_LLAMA, "tokenizer": "bytes"},
    "data": {"path": "rows.jsonl", "sequence_length": 16, "eval_fraction": 0},
    "training": _TRAINING,
}
_TUNING: dict[str, Any] = {
    "task": "supervised_tuning",
    "model": {"config": SMALL_LLAMA, "tokenizer": "bytes"},
    "data": {"path": "rows.jsonl", "eval_fraction": 0},
    "training": _TRAINING | {"max_length": 64, "gradient_checkpointing": False, "bf16": False},
}
_PREFERENCES = _TUNING | {"task": "preference_tuning"}
_REGRESSION: dict[str, Any] = {
    "task": "regression",
    "model": {"config": {"model_type": "perceptron", "hidden_size": 4, "num_hidden_layers": 1}},
    "data": {"type": "diabetes", "max_train_samples": 16, "max_eval_samples": 4},
    "training": _TRAINING,
}

_TEXTS = [{"text": f"number {i} of many", "label": ("even", "odd")[i % 2]} for i in range(8)]
_PAIRS = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(8)]
_CHATS = [
    [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}"}]
    for i in range(8)
]

_ALTERNATING = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% endfor %}"
)
"""A chat template as Mistral's and Gemma's: strict about roles, without marks for the loss."""


def _recipe(base: Mapping[str, Any], **sections: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a recipe with sections merged in."""
    recipe = copy.deepcopy(dict(base))
    for name, section in sections.items():
        recipe[name] = {**(recipe.get(name) or {}), **(section or {})}
    return recipe


def _train(recipe: Mapping[str, Any] | str, *words: str) -> None:
    """Write a recipe to recipe.yaml and train it."""
    text = recipe if isinstance(recipe, str) else yaml.safe_dump(recipe, sort_keys=False)
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    main(["train", "recipe.yaml", *words])


def _trained(recipe: Mapping[str, Any]) -> None:
    """Train a recipe to its end."""
    with contextlib.suppress(SystemExit):
        _train(recipe)
    if not Path("run", "recipe.yaml").exists():
        msg = "the run before the mistake has failed"
        raise AssertionError(msg)


def _csv(rows: Sequence[Mapping[str, Any]], name: str = "rows.csv") -> None:
    with Path(name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _lines(rows: Sequence[Mapping[str, Any]], name: str = "rows.jsonl") -> None:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _save(model: PreTrainedModel, folder: str, chat_template: str | None = None) -> None:
    """Save a model with a tokenizer of bytes."""
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def _llama() -> LlamaForCausalLM:
    settings = {key: value for key, value in SMALL_LLAMA.items() if key != "model_type"}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(byte_tokenizer()), **settings))


def _bert(num_labels: int) -> BertForSequenceClassification:
    settings = {key: value for key, value in BERT["config"].items() if key != "model_type"}
    config = BertConfig(vocab_size=len(byte_tokenizer()), num_labels=num_labels, **settings)
    return BertForSequenceClassification(config)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let the client of the hub know that there is no network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


# Names of models and files


def model_folder_misspelt() -> None:
    _lines(_TEXTS)
    _save(_llama(), "my_model")
    with _offline():
        _train(_recipe(_LANGUAGE, model={"config": None, "path": "my_modl", "tokenizer": None}))


class _NotFound(BaseHTTPRequestHandler):
    """Answer as the hub answers to the name of a repository that it does not have."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def model_not_on_the_hub() -> None:
    _lines(_TEXTS)
    with ThreadingHTTPServer(("127.0.0.1", 0), _NotFound) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{hub.server_port}"
            with client_of(url):
                model = {"config": None, "path": "gpt2-smal", "tokenizer": None}
                _train(_recipe(_LANGUAGE, model=model))
        finally:
            hub.shutdown()
            thread.join()


def hub_without_network() -> None:
    _lines(_TEXTS)
    with _offline():
        _train(_recipe(_LANGUAGE, model={"config": None, "path": "org/model", "tokenizer": None}))


def adapter_as_model() -> None:
    _lines(_TEXTS)
    adapter = get_peft_model(_llama(), LoraConfig(target_modules=["q_proj"]))
    adapter.save_pretrained("adapter")
    _train(_recipe(_LANGUAGE, model={"config": None, "path": "adapter"}))


def weights_are_a_pointer() -> None:
    _lines(_TEXTS)
    _save(_llama(), "base")
    Path("base", "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
        "size 548105171\n",
        encoding="utf-8",
    )
    _train(_recipe(_LANGUAGE, model={"config": None, "path": "base", "tokenizer": None}))


def model_of_another_task() -> None:
    _csv(_TEXTS)
    _train(_recipe(_CLASSIFICATION, model={"config": {"model_type": "vit"}}))


def data_file_misspelt() -> None:
    _csv(_TEXTS)
    _train(_recipe(_CLASSIFICATION, data={"path": "row.csv"}))


def data_path_is_a_folder() -> None:
    Path("data").mkdir()
    _csv(_TEXTS, "data/rows.csv")
    _train(_recipe(_CLASSIFICATION, data={"type": "csv", "path": "data"}))


def data_file_without_ending() -> None:
    _lines(_TEXTS, "dolly-15k")
    _train(_recipe(_LANGUAGE, data={"path": "dolly-15k"}))


def output_folder_used() -> None:
    recipe = _recipe(_REGRESSION, training={"save_strategy": "steps", "save_steps": 1})
    _trained(recipe)
    _train(recipe)


# YAML and the command line


def _regression_text() -> str:
    return yaml.safe_dump(_REGRESSION, sort_keys=False)


def yaml_tab() -> None:
    _train(_regression_text().replace("  max_steps: 2", "\tmax_steps: 2"))


def yaml_key_twice() -> None:
    _train(_regression_text() + "  max_steps: 5\n")


def yaml_wrong_nesting() -> None:
    _train(_regression_text() + "learning_rate: 0.001\n")


def yaml_key_misspelt() -> None:
    _train(_recipe(_REGRESSION, training={"waight_decay": 0.1}))


def eval_strategy_renamed() -> None:
    _train(_recipe(_REGRESSION, training={"evaluation_strategy": "epoch"}))


def max_seq_length_renamed() -> None:
    _lines(_PAIRS)
    _train(_recipe(_TUNING, training={"max_seq_length": 32}))


def epochs_of_another_script() -> None:
    _train(_recipe(_REGRESSION, training={"epochs": 3, "train_batch_size": 8}))


def rate_is_text() -> None:
    _train(_regression_text() + "  learning_rate: 2e-5,\n")


def option_of_trainer_as_flag() -> None:
    _train(_REGRESSION, "--learning_rate", "1e-4")


def set_without_equals_sign() -> None:
    _train(_REGRESSION, "--set", "training.max_steps", "3")


def secret_in_recipe() -> None:
    _train(
        _recipe(_REGRESSION, training={"hub_token": "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3h"})
    )


# Data


def text_column_missing() -> None:
    _lines([{"question": row["text"]} for row in _TEXTS])
    _train(_LANGUAGE)


def label_column_missing() -> None:
    _csv([{"text": row["text"]} for row in _TEXTS])
    _train(_CLASSIFICATION)


def json_line_broken() -> None:
    _lines(_TEXTS)
    with Path("rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": "one more", }\n')
    _train(_LANGUAGE)


def data_file_empty() -> None:
    Path("rows.jsonl").touch()
    _train(_LANGUAGE)


def csv_not_utf8() -> None:
    Path("rows.csv").write_text("text,label\ncafé,a\nthé,b\n", encoding="cp1252")
    _train(_CLASSIFICATION)


def csv_header_twice() -> None:
    Path("rows.csv").write_text("a,b,y\n1,2,3\n4,5,6\na,b,y\n7,8,9\n", encoding="utf-8")
    columns = {"features": ["a", "b"], "target": "y"}
    _train(_recipe(_REGRESSION | {"data": {}}, data={"path": "rows.csv", "columns": columns}))


def row_without_text() -> None:
    _lines([*_TEXTS[:3], {"text": None, "label": "odd"}, *_TEXTS[3:]])
    _train(_LANGUAGE)


def text_read_as_missing() -> None:
    _csv([{"text": "None", "label": "odd"}, *_TEXTS])
    _train(_CLASSIFICATION)


def answer_is_empty() -> None:
    _lines([*_PAIRS, {"prompt": "", "completion": ""}])
    _train(_TUNING)


def chat_template_missing() -> None:
    _lines([{"messages": chat} for chat in _CHATS])
    _save(_llama(), "base")
    _train(_recipe(_TUNING, model={"config": None, "path": "base", "tokenizer": None}))


def _train_chats(chats: Sequence[Any], **training: Any) -> None:
    """Train a model with a strict chat template."""
    _lines([{"messages": chat} for chat in chats])
    _save(_llama(), "base", _ALTERNATING)
    model = {"config": None, "path": "base", "tokenizer": None}
    _train(_recipe(_TUNING, model=model, training=training))


def messages_with_other_keys() -> None:
    chat = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
    _train_chats([chat] * 8, assistant_only_loss=False)


def roles_do_not_alternate() -> None:
    question = {"role": "user", "content": "Well?"}
    _train_chats([*_CHATS, [question, question, {"role": "assistant", "content": "2"}]])


def role_unknown_to_template() -> None:
    system = {"role": "system", "content": "Be brief."}
    _train_chats([*_CHATS, [system, *_CHATS[0]]], assistant_only_loss=False)


def turn_is_empty() -> None:
    empty = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": ""}]
    _train_chats([*_CHATS, empty], assistant_only_loss=False)


def completion_cut_off() -> None:
    _lines([{"prompt": "a long prompt " * 4, "completion": f" {i}"} for i in range(8)])
    _train(_recipe(_TUNING, training={"max_length": 16}))


def assistant_marks_missing() -> None:
    _train_chats(_CHATS, assistant_only_loss=True)


def eos_token_unknown() -> None:
    _lines(_PAIRS)
    _train(_recipe(_TUNING, training={"eos_token": "<|im_end|>"}))


def vocabulary_too_small() -> None:
    _lines(_TEXTS)
    _train(_recipe(_LANGUAGE, model={"config": SMALL_LLAMA | {"vocab_size": 100}}))


def sequences_beyond_positions() -> None:
    _csv(_TEXTS)
    _train(_recipe(_CLASSIFICATION, data={"sequence_length": 512}))


def rejected_answer_missing() -> None:
    _lines([{"query": "1 + 1?", "response": "2", "rejected_response": "3"} for _ in range(8)])
    _train(_PREFERENCES)


def fewer_rows_than_a_batch() -> None:
    _csv(_TEXTS)
    training = {"per_device_train_batch_size": 64, "dataloader_drop_last": True}
    _train(_recipe(_CLASSIFICATION, training=training))


def stream_without_max_steps() -> None:
    _lines(_TEXTS)
    data = {"type": "datasets", "path": "json", "data_files": "rows.jsonl", "streaming": True}
    training = {"max_steps": -1, "num_train_epochs": 3}
    _train(_recipe(_LANGUAGE | {"data": {}}, data=data, training=training))


# Training arguments


def eval_without_data() -> None:
    _csv(_TEXTS)
    _train(_recipe(_CLASSIFICATION, training={"eval_strategy": "steps", "eval_steps": 1}))


def strategies_differ() -> None:
    training = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "epoch"}
    _train(_recipe(_REGRESSION, training=training | {"load_best_model_at_end": True}))


def best_model_without_eval() -> None:
    training = {"save_strategy": "steps", "load_best_model_at_end": True}
    _train(_recipe(_REGRESSION, training=training))


def saves_between_evals() -> None:
    training = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    training |= {"save_steps": 3, "load_best_model_at_end": True}
    _train(_recipe(_REGRESSION, training=training))


def nothing_saved_before_the_end() -> None:
    training = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    training |= {"save_steps": 500, "load_best_model_at_end": True}
    _train(_recipe(_REGRESSION, training=training))


def metric_unknown() -> None:
    training = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    training |= {"save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "f1"}
    _train(_recipe(_REGRESSION, training=training))


def rate_too_high() -> None:
    _csv(_TEXTS)
    training = {"learning_rate": 1000, "max_steps": 30}
    shipped = {"monitor_config": {"monitor_on": True}, "runner_wrapper": {"local_norm": True}}
    recipe = _recipe(_CLASSIFICATION, training=training, **shipped)
    _train(recipe | {"callbacks": [{"type": "MFLossMonitor"}]})


def fp16_on_cpu() -> None:
    _train(_recipe(_REGRESSION, training={"fp16": True}))


def flash_attention_missing() -> None:
    _lines(_TEXTS)
    _train(_recipe(_LANGUAGE, model={"attn_implementation": "flash_attention_2"}))


def bitsandbytes_missing() -> None:
    _train(_recipe(_REGRESSION, training={"optim": "adamw_8bit"}))


def deepspeed_missing() -> None:
    _train(_recipe(_REGRESSION, training={"deepspeed": "ds_configs/zero2.json"}))


def tracker_missing() -> None:
    _train(_recipe(_REGRESSION, training={"report_to": "comet_ml"}))


def push_without_login() -> None:
    with serving() as hub, client_of(hub.url), pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_TOKEN")
        hub.refuses = lambda _: True
        _train(_recipe(_REGRESSION, training={"push_to_hub": True}))


# Checkpoints and adapters

_SAVED = _recipe(_REGRESSION, training={"save_strategy": "steps", "save_steps": 1})


def resume_path_misspelt() -> None:
    _trained(_SAVED)
    _train(_SAVED, "--resume", "run/checkpoint-32500")


def resume_without_checkpoint() -> None:
    _train(_SAVED, "--resume")


def resume_from_a_partial_checkpoint() -> None:
    _trained(_SAVED)
    for file in Path("run", "checkpoint-2").iterdir():
        if file.name not in {"config.json", "model.safetensors"}:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    _train(_SAVED, "--resume", "run/checkpoint-2")


def resume_with_another_model() -> None:
    _trained(_SAVED)
    config = _REGRESSION["model"]["config"] | {"hidden_size": 8}
    _train(_recipe(_SAVED, model={"config": config}, training={"max_steps": 3}), "--resume")


def adapter_of_another_rank() -> None:
    _lines(_PAIRS)
    peft = {"type": "lora", "r": 2, "target_modules": ["q_proj"]}
    training = {"save_strategy": "steps", "save_steps": 1}
    recipe = _recipe(_TUNING, training=training, peft=peft)
    _trained(recipe)
    _train(_recipe(recipe, peft={"r": 4}, training={"max_steps": 3}), "--resume")


def adapter_targets_nothing() -> None:
    _lines(_PAIRS)
    _train(_recipe(_TUNING, peft={"type": "lora", "target_modules": ["query_key_value"]}))


def head_of_other_size() -> None:
    _csv(_TEXTS)
    _save(_bert(9), "base")
    _train(_recipe(_CLASSIFICATION, model={"config": None, "path": "base", "tokenizer": None}))


def disk_full() -> None:
    Path("run").mkdir()
    Path("recipe.yaml").write_text(yaml.safe_dump(_SAVED, sort_keys=False), encoding="utf-8")
    mount = "mount -t tmpfs -o size=80k tmpfs run"
    program = f"{mount} && exec {sys.executable} -m mfwrap train recipe.yaml"
    ended = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(ended.stderr)
    sys.exit(ended.returncode)


def launcher_variables_missing() -> None:
    # accelerate sets further variables of the environment.
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "4"}):
        os.environ.pop("MASTER_ADDR", None)
        _train(_REGRESSION)
