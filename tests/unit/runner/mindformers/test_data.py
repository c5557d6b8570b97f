"""Data that MindFormers reads with `datasets` become a real section; others name their reason."""

import json

import pytest
import yaml

from mfwrap.runner import import_mindformers, parse_recipe
from mfwrap.runner.run import build_trainer
from support.mindformers_files import imported, imported_recipe

NETWORK = {
    "use_legacy": False,
    "model": {
        "model_config": {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            "seq_length": 600,
            "compute_dtype": "bfloat16",
            "params_dtype": "float32",
        }
    },
}
ALPACA = {
    "type": "AlpacaInstructDataHandler",
    "padding": False,
    "tokenizer": {"padding_side": "right"},
    "seq_length": 600,
}
PACKING = {"type": "PackingHandler", "seq_length": 600, "pack_strategy": "pack"}
LOADER = {
    "type": "HFDataLoader",
    "load_func": "load_dataset",
    "path": "json",
    "data_files": "alpaca.json",
    "split": "train",
    "shuffle": False,
    "use_broadcast_data": True,
    "handler": [ALPACA, PACKING],
}
COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids"]


def with_loader(*columns, **changes):
    """Return changes of the file that give it the loader, with changes of the loader."""
    loader = {key: value for key, value in (LOADER | changes).items() if value is not None}
    data = {"data_loader": loader, "input_columns": [*COLUMNS, *columns]}
    return NETWORK | {"train_dataset": data}


CONVERTED = {
    "type": "datasets",
    "path": "json",
    "data_files": "alpaca.json",
    "split": "train",
    "template": "alpaca",
    "sequence_length": 600,
    "packing": True,
    "separate_texts": True,
    "targets": "mindformers",
    "eval_fraction": 0.0,
}


@pytest.mark.parametrize("loader", ["HFDataLoader", "CommonDataLoader"])
@pytest.mark.parametrize("mask", ["attention_mask", "actual_seq_len", None])
def test_instructions_that_are_packed(loader, mask):
    """The section reads the same rows; the network's columns say whether texts are apart."""
    found, recipe = imported(with_loader(*([] if mask is None else [mask]), type=loader))

    assert recipe["data"] == CONVERTED | {"separate_texts": mask is not None}
    assert recipe["training"]["train_sampling_strategy"] == "sequential"
    assert any("shifts the labels a second time" in note for note in found.notes)


def test_other_files_and_a_part_of_the_rows():
    """Arguments of ``load_dataset`` are kept, and ``take`` limits the rows."""
    handler = [{"type": "take", "n": 2000}, {**ALPACA, "seq_length": 400}]
    changes = {"path": "parquet", "data_files": ["a.parquet", "b.parquet"], "handler": handler}
    _, recipe = imported(with_loader(**changes))

    assert recipe["data"] == {
        "type": "datasets",
        "path": "parquet",
        "data_files": ["a.parquet", "b.parquet"],
        "split": "train",
        "max_train_samples": 2000,
        "template": "alpaca",
        "sequence_length": 400,
        "eval_fraction": 0.0,
    }


def test_an_evaluation_needs_rows():
    """With ``do_eval``, rows are held out, which a note says."""
    found, recipe = imported(with_loader() | {"do_eval": True})
    assert "eval_fraction" not in recipe["data"]
    assert any("held out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (with_loader() | {"use_legacy": True}, "use_legacy: False"),
        (with_loader(load_func="load_from_disk"), "only load_dataset without streaming"),
        (with_loader(streaming=True), "only load_dataset without streaming"),
        (with_loader(field="rows"), "does not know ['field'] of the loader"),
        (with_loader(handler=None), "only the handlers"),
        (with_loader(handler=[{"type": "CodeAlpacaInstructDataHandler"}]), "only the handlers"),
        (with_loader(handler=[{"type": "shuffle", "seed": 1}, ALPACA]), "only the handlers"),
        (with_loader(handler=[ALPACA, PACKING | {"seq_length": 8}]), "must have one seq_length"),
        (with_loader(handler=[ALPACA, PACKING | {"pack_strategy": "truncate"}]), "pack_strategy"),
        (with_loader(path="json", data_files=None), "needs `data_files`"),
        (with_loader(handler=[{"type": "take", "n": "all"}, ALPACA]), "max_train_samples"),
        ({"train_dataset": {"data_loader": {"type": "TFRecordDataset"}}}, "does not read TFRecord"),
    ],
)
def test_what_cannot_be_converted(changes, says):
    """The data stay as a name, and a note says why."""
    found, recipe = imported(changes)

    assert recipe["data"]["type"] == "mindformers"
    assert any(says in note and "replace the section data" in note for note in found.notes)


ROWS = [
    {"instruction": f"Say {word}.", "input": "", "output": word}
    for word in ("one", "two", "three", "four")
]


@pytest.mark.filterwarnings("ignore")
def test_the_rows_that_are_trained(tmp_path, monkeypatch):
    """The Trainer's batch has the packed rows of the file's data, without a mask."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alpaca.json").write_text(json.dumps(ROWS), encoding="utf-8")
    trainer, _ = build_trainer(
        imported_recipe(with_loader("attention_mask"), f"training.output_dir={tmp_path}/run")
    )
    rows = trainer.train_dataset
    batch = next(iter(trainer.get_train_dataloader()))

    assert {*batch} == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].shape[1] == 601
    assert len(rows) == len(ROWS)  # two of the texts are longer than a row
    ids, labels = rows[0]["input_ids"], rows[0]["labels"]
    learned = [at for at, label in enumerate(labels) if label not in (-100, 0)]
    decode = trainer.processing_class.decode
    assert decode([labels[at] for at in learned]) == "ASSISTANT: one</s>"
    # A model predicts labels[at] from the tokens before `at`: here, the token after the next one.
    assert all(labels[at] == ids[at + 1] for at in learned)


def test_a_file_of_the_pynative_trainer():
    """Its loader has the same handlers; texts of a row are always apart."""
    file = {
        "training": {"steps": 2},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3, "warmup_steps": 0},
        "train_dataset": {"dataloader": LOADER | {"create_compressed_eod_mask": False}},
        "model": NETWORK["model"]["model_config"]
        | {"architectures": "Qwen3ForCausalLM", "hidden_dropout": 0.0},
    }
    found = import_mindformers(yaml.safe_dump(file), "f.yaml")
    parse_recipe(found.text, "f.yaml")
    assert yaml.safe_load(found.text)["data"] == CONVERTED
    assert not any("labels as they are" in note for note in found.notes)
