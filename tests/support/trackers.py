"""Read back what experiment trackers have written offline."""

import json
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

_BLOCK = 2**15
_HEADER = 7


def have_wandb_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have wandb write into a folder, without a network; it leaves the console as it is."""
    pytest.importorskip("wandb", reason="needs wandb")
    settings = {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}
    folders = {name: str(folder) for name in ("CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "DIR")}
    for name, value in (settings | folders).items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """End wandb, and return the rows of the history of its only offline run below a folder.

    A run that is left open goes on hearing what the program prints and logs.

    The file is a log of LevelDB: blocks of 32 KiB, with a header of seven bytes before each chunk,
    and in the first block seven bytes of wandb.
    """
    import wandb  # noqa: PLC0415  (slow)
    from wandb.proto import wandb_internal_pb2  # noqa: PLC0415  (slow)

    wandb.finish()  # the Trainer's callback leaves it open
    wandb.teardown()  # waits until wandb's process has written everything

    [file] = folder.glob("**/*.wandb")
    rows = []
    for content in _chunks(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            row = {name: json.loads(item.value_json) for name, item in items.items()}
            rows.append({**row, "_step": record.history.step.num})
    return rows


def _chunks(data: bytes) -> list[bytes]:
    contents, position, whole = [], _HEADER, b""
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        if not kind:
            position += left
            continue
        whole += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in {1, 4}:  # a whole record, or the last part of one
            contents.append(whole)
            whole = b""
    return contents


def trackio_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of trackio's only project in a folder, with their ``_step``."""
    [file] = folder.glob("*.db")
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    return [{**json.loads(metrics), "_step": step} for step, metrics in rows]


def mlflow_rows(uri: str) -> list[dict[str, Any]]:
    """Return a row for each step of the only MLflow run at a tracking URI."""
    import mlflow  # noqa: PLC0415  (slow)

    client = mlflow.MlflowClient(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    [run] = client.search_runs(experiments)
    rows: dict[int, dict[str, Any]] = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            row = rows.setdefault(point.step, {"_step": point.step})
            assert name not in row, f"{name} is twice at step {point.step}"
            row[name] = point.value
    return [rows[step] for step in sorted(rows)]


def tensorboard_rows(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each step of the events files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415  (slow)
        EventAccumulator,
    )

    events = EventAccumulator(str(folder))
    events.Reload()
    rows: dict[int, dict[str, Any]] = {}
    for tag in events.Tags()["scalars"]:
        for point in events.Scalars(tag):
            row = rows.setdefault(point.step, {"_step": point.step})
            assert tag not in row, f"{tag} is twice at step {point.step}"
            row[tag] = point.value
    return [rows[step] for step in sorted(rows)]
