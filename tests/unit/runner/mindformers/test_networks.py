"""Files of MindFormers for ten networks train after the import, with the first loss they should."""

import copy
import itertools
import json
import math

import pytest
import yaml
from transformers import TrainerCallback

from mfwrap.runner import import_mindformers, parse_recipe
from mfwrap.runner.run import build_trainer
from support.mindformers_files import ABSENT, imported
from support.networks import BY_HAND, enlarge

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and datasets emit warnings

_DENSE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
"""``model.config`` of the small networks that are written by hand."""

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GPT = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4}
_OWN = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 32000}
_CORE = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-5,
    "init_method_std": 0.01,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FILES = {
    "llama31": (
        {
            "type": "LlamaConfig",
            **_OWN,
            "n_kv_heads": 8,
            "intermediate_size": 14336,
            "theta": 500.0,
            "extend_method": "LLAMA3",
            "scaling_factor": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        None,
        _DENSE,
    ),
    "qwen2": ({"type": "LlamaConfig", **_OWN, "qkv_has_bias": True}, None, _DENSE),
    "qwen3": (
        {"model_type": "qwen3", **_CORE, "intermediate_size": 6144},
        None,
        {**_DENSE, "head_dim": 16},
    ),
    "qwen3_moe": (
        {"model_type": "qwen3_moe", **_CORE, "num_experts": 128, "moe_ffn_hidden_size": 768},
        None,
        {**_DENSE, **_EXPERTS, "head_dim": 16, "num_experts": 4},
    ),
    "mixtral": (
        {"type": "LlamaConfig", **_OWN, "n_kv_heads": 8, "intermediate_size": 14336},
        {"expert_num": 8, "num_experts_chosen": 2, "use_gmm": True},
        {**_DENSE, "num_local_experts": 4},
    ),
    "glm": (
        {"type": "ChatGLM2Config", "num_layers": 40, "rope_ratio": 500},
        None,
        {**_DENSE, "head_dim": 8},
    ),
    "deepseek_v3": (
        {"type": "DeepseekV3Config", **_OWN, "extend_method": "None"},
        {
            "expert_num": 256,
            "num_experts_chosen": 8,
            "shared_expert_num": 1,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
            "use_gating_sigmoid": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "use_gmm": True,
        },
        {
            **_DENSE,
            **_EXPERTS,
            **_LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "gpt2": (
        {"type": "GPT2Config", "num_layers": 12, "num_heads": 12},
        None,
        {**_GPT, **_NO_DROPOUT, "n_inner": 128, "n_positions": 64},
    ),
    "bloom": (
        {"type": "BloomConfig", "hidden_size": 1024, "num_layers": 24, "num_heads": 16},
        None,
        {
            **_GPT,
            "hidden_size": 32,
            "n_embd": ABSENT,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "bert": (
        {"type": "BertConfig", "num_labels": 3},
        None,
        {
            **_DENSE,
            "num_key_value_heads": ABSENT,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout": 0.0,
        },
    ),
}
"""By name of the network: ``model_config`` and ``moe_config`` of the file, and keys of
``model.config`` that make it small. ABSENT: the small network has no such key."""


def data_of(folder, name):
    """Write 40 texts, for BERT with one of three labels; return the section ``data``."""
    rows = [{"text": f"{number} " * 12, "label": f"class {number % 3}"} for number in range(40)]
    if name != "bert":
        rows = [{"text": row["text"]} for row in rows]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"type": "json_lines", "path": str(path), "eval_fraction": 0.1, "sequence_length": 24}


WANTED = ("input_ids", "attention_mask", "labels")


class Updates(TrainerCallback):
    """Keep the batches of a training, and the rate of each update."""

    def __init__(self):
        self.batches, self.rates, self.ends = [], [], [0]

    def keep(self, network, _, batch):
        """Keep what a network is called with."""
        self.batches.append({key: value for key, value in batch.items() if key in WANTED})

    def on_step_end(self, args, state, control, step_output=None, **kwargs):
        """Keep the rate of an update, and where its batches end."""
        self.rates.append(step_output.learning_rate.item())
        self.ends.append(len(self.batches))


def trained(recipe, folder, sizes):
    """Train 20 steps of a small network.

    Args:
        recipe: Sections of the recipe.
        folder: Folder of the run.
        sizes: Keys of ``model.config``.

    Returns:
        The updates, the loss of each, and the losses of the first one's batches by hand.
    """
    overrides = [
        *(f"model.config.{key}={value}" for key, value in sizes.items() if value is not ABSENT),
        f"training.output_dir={folder / 'run'}",
        "training.max_steps=20",
        "training.logging_steps=1",
        "training.use_cpu=true",
    ]
    trainer, _ = build_trainer(parse_recipe(yaml.safe_dump(recipe), "m.yaml", overrides))
    enlarge(trainer.model)
    start = copy.deepcopy(trainer.model.state_dict())
    updates = Updates()
    trainer.model.register_forward_pre_hook(updates.keep, with_kwargs=True)
    trainer.add_callback(updates)
    trainer.train()
    name = trainer.model.config.model_type
    by_hand = BY_HAND[{"llama": "llama31"}.get(name, name)]()
    by_hand.load_state_dict(start)
    first = [by_hand(**batch).loss.item() for batch in updates.batches[: updates.ends[1]]]
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert len(losses) == 20
    assert all(map(math.isfinite, losses))
    return updates, losses, first


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_an_imported_file_trains(tmp_path, name):
    """The first of 20 losses is that of the network written by hand, with the same weights."""
    settings, experts, sizes = FILES[name]
    precision = {"compute_dtype": "float32", "param_init_type": "float32"}
    changes = {
        "model": {"model_config": settings | precision},
        "moe_config": experts or {},
    }
    if name == "bert":
        changes["trainer.type"] = "TextClassificationTrainer"
    result, recipe = imported(changes)
    recipe["data"] = data_of(tmp_path, name)
    _, losses, first = trained(recipe, tmp_path, sizes)

    assert result.losses == []
    assert losses[0] == pytest.approx(first[0], rel=1e-6)


RATE = 1e-3


def cosine(step):
    """Return the rate of CosineWithWarmUpLR with 4 of 20 steps of warm-up, by MindFormers' rule."""
    if step < 4:
        return RATE * step / 4
    return 1e-5 + (RATE - 1e-5) * 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))


def stable(step):
    """Return the rate of WarmUpStableDecayLR, by MindFormers' rule."""
    if step < 2:
        return RATE * step / 2
    return RATE if step < 10 else 1e-7 + (RATE - 1e-7) * (20 - step) / 10


def linear(step):
    """Return the rate of LinearWithWarmUpLR with 5 steps of warm-up, by MindFormers' rule."""
    return RATE * step / 5 if step < 5 else RATE * (20 - step) / 15


def grown(consumed):
    """Return the rows of an update for ``[2, 2, 24]`` and 8 rows, by MindFormers' rule."""
    levels = (8 - 2) // 2
    return 8 if consumed > 24 else min(2 + 2 * int(consumed / (24 / levels)), 8)


def eight(_):
    """Return the rows of an update of one size."""
    return 8


_QWEN3 = {
    "model_type": "qwen3",
    "architectures": "Qwen3ForCausalLM",
    "hidden_dropout": 0.0,
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": "DeepseekV3ForCausalLM",
    "hidden_dropout": 0.0,
    "num_nextn_predict_layers": 0,
    "rotary_scaling_factor": 1.0,
    **_LATENT,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
}

PYNATIVE = {
    "qwen3": (
        _QWEN3,
        {"type": "CosineWithWarmUpLR", "lr_end": 1e-5, "warmup_ratio": 0.2},
        (cosine, eight),
    ),
    "qwen3 that grows": (
        _QWEN3,
        {"type": "WarmUpStableDecayLR", "warmup_steps": 2, "decay_start_steps": 10},
        (stable, grown),
    ),
    "deepseek_v3": (
        _DEEPSEEK,
        {"type": "LinearWithWarmUpLR", "warmup_steps": 5},
        (linear, eight),
    ),
}
"""Sections ``model`` and ``lr_scheduler`` of files of the PyNative trainer; rate and rows by step.
"""


@pytest.mark.parametrize("name", PYNATIVE)
@pytest.mark.slow
def test_a_file_of_pynative_trains(tmp_path, name):
    """The first loss is that of the network written by hand; rates and rows follow the rules."""
    model, schedule, (rate, rows) = PYNATIVE[name]
    dtypes = {"params_dtype": "float32", "compute_dtype": "float32"}
    growth = {"rampup_batch_size": [2, 2, 24]} if rows is grown else {}
    file = {
        "training": {"steps": 1000, "local_batch_size": 2, "global_batch_size": 8, **growth},
        "optimizer": {"type": "AdamW"},
        "lr_scheduler": schedule | {"learning_rate": RATE},
        "train_dataset": {"dataloader": {"type": "MindDataset", "dataset_files": "/data"}},
        "model": model | {"seq_length": 4096, **dtypes},
        "checkpoint": {"enable_save": False},
    }
    result = import_mindformers(yaml.safe_dump(file), "f.yaml")
    kind = name.split()[0]
    recipe = yaml.safe_load(result.text)
    recipe["data"] = data_of(tmp_path, kind)
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text * 5)  # so that no epoch ends within 20 updates
    updates, losses, first = trained(recipe, tmp_path, FILES[kind][2])
    by_rule, consumed = [], 0
    for _ in range(20):
        by_rule.append(rows(consumed))
        consumed += by_rule[-1]

    assert result.losses == []
    assert losses[0] == pytest.approx(sum(first) / len(first), rel=1e-6)
    assert updates.rates == pytest.approx([rate(step) for step in range(20)], rel=1e-6, abs=1e-12)
    assert [2 * (end - begin) for begin, end in itertools.pairwise(updates.ends)] == by_rule
