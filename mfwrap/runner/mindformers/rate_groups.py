"""Convert the parameter names of MindFormers' ``grouped_lr_schedule`` to those of transformers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.recipes.tasks.table import TASKS
from mfwrap.runner.parameter_groups import first_match

MODEL_TYPES = frozenset({"deepseek_v3", "qwen2", "qwen3", "qwen3_moe"})
"""Types of transformers' models whose parameters have names in MindFormers below."""

_NAMES = (
    (r"^model\.embed_tokens\.", "embedding.word_embeddings."),
    (r"^lm_head\.", "output_layer."),
    (r"^model\.norm\.", "decoder.final_layernorm."),
    (r"^model\.layers\.", "decoder.layers."),
    (r"\.self_attn\.(q|k|v|q_a)_proj\.", ".self_attention.linear_qkv."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".self_attention.linear_qkv."),
    (r"\.self_attn\.(q|kv)_b_proj\.", r".self_attention.linear_\1b."),
    (r"\.self_attn\.q_a_layernorm\.", ".self_attention.q_layernorm."),
    (r"\.self_attn\.kv_a_layernorm\.", ".self_attention.k_layernorm."),
    (r"\.self_attn\.(q|k)_norm\.", r".self_attention.\1_layernorm."),
    (r"\.self_attn\.o_proj\.", ".self_attention.linear_proj."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.mlp\.gate\.", ".mlp.router."),
    (r"\.experts\.gate_up_proj$", ".experts.weight1"),
    (r"\.experts\.down_proj$", ".experts.weight2"),
    (r"\.(gate|up)_proj\.", ".linear_fc1."),
    (r"\.down_proj\.", ".linear_fc2."),
)
"""Parts of the names in transformers, and what MindFormers has there. MindFormers has one weight
for queries, keys and values, and one for the two inner projections of an MLP."""


def parameter_names(config: Mapping[str, Any], task: str) -> list[str]:
    """Return the names of the parameters of a recipe's network, without memory for them.

    Args:
        config: Section ``model.config`` of the recipe.
        task: Task of the recipe.
    """
    return [name for name, _ in network_of(config, task).named_parameters()]


def network_of(config: Mapping[str, Any], task: str) -> nn.Module:
    """Return a recipe's network without memory for its weights; see `parameter_names`."""
    with torch.device("meta"):
        return ModelSettings(config=dict(config)).make_model(TASKS[task].auto_class)


def converted_patterns(
    names: Iterable[str], groups: Sequence[Sequence[str]]
) -> list[list[str]] | None:
    """Return patterns of transformers' names for groups of patterns of MindFormers' names.

    A parameter belongs to the first group that has a part of its name in MindFormers, or a shell
    pattern of all of it.

    Source: MindFormers, ``get_optimizer_grouped_parameters``.

    Args:
        names: Names of the model's trainable parameters in transformers.
        groups: MindFormers' patterns of each group.

    Returns:
        For each group, names, with ``*`` for the number of the layer if all layers belong to the
        group; ``None`` if a group has no parameter.
    """
    numbers = {name: first_match(mindformers_name(name), groups) for name in names}
    of_template: dict[str, set[int | None]] = {}
    for name, number in numbers.items():
        of_template.setdefault(_template(name), set()).add(number)
    converted: list[dict[str, None]] = [{} for _ in groups]
    for name, number in numbers.items():
        if number is not None:
            template = _template(name)
            is_whole = len(of_template[template]) == 1
            converted[number][template if is_whole else name] = None
    return [list(patterns) for patterns in converted] if all(converted) else None


def mindformers_name(name: str) -> str:
    """Return MindFormers' name of the parameter that has, or is, a parameter of transformers.

    Args:
        name: Name of a parameter in a model with one of `MODEL_TYPES`.
    """
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _template(name: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)
