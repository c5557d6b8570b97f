"""Find the weights that a MindFormers file starts from."""

import pathlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mfwrap.runner.document import Path
from mfwrap.runner.mindformers.source import SourceFile

HUB_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "bert_base_cased": "google-bert/bert-base-cased",
        "bert_base_chinese": "google-bert/bert-base-chinese",
        "bert_base_uncased": "google-bert/bert-base-uncased",
        "bloom_176b": "bigscience/bloom",
        "bloom_560m": "bigscience/bloom-560m",
        "bloom_7.1b": "bigscience/bloom-7b1",
        "codellama_34b": "codellama/CodeLlama-34b-hf",
        "deepseek3_671b": "deepseek-ai/DeepSeek-V3",
        "gpt2": "openai-community/gpt2",
        "gpt2_xl": "openai-community/gpt2-xl",
        "llama2_13b": "meta-llama/Llama-2-13b-hf",
        "llama2_70b": "meta-llama/Llama-2-70b-hf",
        "llama2_7b": "meta-llama/Llama-2-7b-hf",
        "llama3_1_70b": "meta-llama/Llama-3.1-70B",
        "llama3_1_8b": "meta-llama/Llama-3.1-8B",
        "llama3_70b": "meta-llama/Meta-Llama-3-70B",
        "llama3_8b": "meta-llama/Meta-Llama-3-8B",
        "llama_13b": "huggyllama/llama-13b",
        "llama_65b": "huggyllama/llama-65b",
        "llama_7b": "huggyllama/llama-7b",
        "mixtral_8x7b": "mistralai/Mixtral-8x7B-v0.1",
        "qwen1_5_0.5b": "Qwen/Qwen1.5-0.5B",
        "qwen1_5_14b": "Qwen/Qwen1.5-14B",
        "qwen1_5_4b": "Qwen/Qwen1.5-4B",
        "qwen1_5_72b": "Qwen/Qwen1.5-72B",
        "qwen1_5_7b": "Qwen/Qwen1.5-7B",
        "qwen2_0.5b": "Qwen/Qwen2-0.5B",
        "qwen2_1.5b": "Qwen/Qwen2-1.5B",
        "qwen2_57b": "Qwen/Qwen2-57B-A14B",
        "qwen2_72b": "Qwen/Qwen2-72B",
        "qwen2_7b": "Qwen/Qwen2-7B",
        "qwen2_5_0.5b": "Qwen/Qwen2.5-0.5B",
        "qwen2_5_1.5b": "Qwen/Qwen2.5-1.5B",
        "qwen2_5_14b": "Qwen/Qwen2.5-14B",
        "qwen2_5_32b": "Qwen/Qwen2.5-32B",
        "qwen2_5_72b": "Qwen/Qwen2.5-72B",
        "qwen2_5_7b": "Qwen/Qwen2.5-7B",
        "t5_small": "google-t5/t5-small",
        "vit_base_p16": "google/vit-base-patch16-224",
        "yi_34b": "01-ai/Yi-34B",
        "yi_6b": "01-ai/Yi-6B",
    }
)
"""Published checkpoint on the Hugging Face hub, with safetensors, for MindFormers' name of it."""

_ON_THE_HUB = re.compile(r"(?!path/)[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")
_MINDSPORE_FILE = re.compile(r".*\.(ckpt|mindir|safetensors|npz)")
_INSTEAD = "the recipe starts from random weights"


def take_weights(source: SourceFile, settings: dict[str, Any], *, finetunes: bool) -> str | None:
    """Return ``model.path`` of the recipe; ``None`` to start from random weights.

    The weights are those of ``load_checkpoint``, or of ``pretrained_model_dir``. Only a finetuning
    and a file with ``auto_trans_ckpt`` also look into ``checkpoint_name_or_path``.

    Source: MindFormers, ``run_mindformer.py`` and ``Trainer``.

    Args:
        source: File, whose keys about checkpoints are taken.
        settings: ``model_config``, whose key ``checkpoint_name_or_path`` is taken.
        finetunes: Whether ``run_mode`` is ``finetune``.

    Raises:
        RecipeError: If the file describes neither the network nor a checkpoint that has its
            ``config.json``, or a value has a wrong type.
    """
    _take_resumption(source)
    converts = source.flag("auto_trans_ckpt")
    inner = ("model", "model_config", "checkpoint_name_or_path")
    named = settings.pop("checkpoint_name_or_path", None)
    named = named if isinstance(named, str) and named not in {"", "None"} else None
    found: list[tuple[Path, str | None]] = [
        (("load_checkpoint",), source.text("load_checkpoint")),
        (("pretrained_model_dir",), source.text("pretrained_model_dir")),
        (inner, named if finetunes or converts else None),
    ]
    path, name = next(((path, name) for path, name in found if name), ((), None))
    if name is not None:
        has_network = bool(settings.keys() & {"type", "model_type"})
        return _place_of(source, path, name, has_network=has_network)
    if finetunes:
        _lose_unnamed(source)
    elif named is not None:
        source.notes.append(
            f"{'.'.join(inner)}: with run_mode train, MindFormers takes weights from "
            f"load_checkpoint alone; it is empty, so {_INSTEAD}"
        )
    return None


def published_name(name: str) -> str | None:
    """Return the published checkpoint for a name of MindFormers; ``None`` if there is none."""
    plain = name.removeprefix("mindspore/").lower().replace("-", "_")
    return HUB_NAMES.get(plain)


def _place_of(source: SourceFile, path: Path, name: str, *, has_network: bool) -> str | None:
    """Return ``model.path`` for a checkpoint that a file names; a loss if there is none.

    Raises:
        RecipeError: If there is no such checkpoint, and the file does not describe the network.
    """
    if (published := published_name(name)) is not None:
        source.notes.append(f"{path[-1]}: {name} becomes {published} on the Hugging Face hub")
        return published
    is_folder = pathlib.Path(name, "config.json").is_file()
    has_form = _ON_THE_HUB.fullmatch(name) and not _MINDSPORE_FILE.fullmatch(name)
    if is_folder or has_form:
        return name
    if not has_network:
        says = "expected a folder with config.json, or a model on the Hugging Face hub, because"
        says = f"{says} model_config does not describe the network, got {name!r}"
        raise source.document.error(path, says)
    source.lose(
        "weights",
        path,
        f"{name!r} is neither a folder with config.json and safetensors nor a model on the Hugging "
        f"Face hub, and mfwrap does not read MindSpore's checkpoints; {_INSTEAD}",
    )
    return None


def _lose_unnamed(source: SourceFile) -> None:
    name = source.document.data.get("trainer")
    model = name.get("model_name") if isinstance(name, dict) else None
    published = published_name(model.removesuffix("_lora")) if isinstance(model, str) else None
    hint = "" if published is None else f" (set model.path in it to {published}, for example)"
    source.lose(
        "weights",
        ("run_mode",),
        f"the file finetunes weights that it does not name; {_INSTEAD}{hint}",
    )


def _take_resumption(source: SourceFile) -> None:
    if source.take("resume_training") not in (None, False):
        says = "the file resumes a run, whose optimizer and position only MindSpore can read"
        source.lose("resume", ("resume_training",), f"{says}; the recipe begins at step 0")
