"""Write run folders in which one value is not what mfwrap writes."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mfwrap.callbacks.culprit.anomaly_log import Anomaly, BadRow, GroupNorm, StateNorm
from support.run_folders import write_lines, write_run

__all__ = ["ODD_VALUES", "mutate", "write_full_run"]

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 2**53 + 1, 10**30, 10**400, -(10**400), float("1e308")),
    *("", "nan", "-inf", "1", "\u2028<b>", "x" * 2000),
    *([], [None], [[1]], ["1"], [10**400], {}, {"": {}}, {"a": [1]}, {"name": 1, "step": "1"}),
)
"""Values that JSON can represent."""

_NOT_JSON = (b"1e999", b"-1E999", b"NaN", b"Infinity", b'"\\ud800"', b"[" * 3000 + b"]" * 3000)
"""Values that Python's parser takes, or nearly."""


def write_full_run(folder: Path) -> Path:
    """Write a run folder with all files that a page shows, and all fields of an anomaly."""
    write_run(folder, num_steps=12, num_ranks=2)
    row = {
        "rank": 0,
        "micro_batch": 1,
        "row": 2,
        "index": 30,
        "epoch": 0,
        "position": 7,
        "loss": 3.0,
        "gradient_norm": 5.0,
        "loss_without": 1.0,
        "gradient_norm_without": 1.0,
    }
    anomaly = Anomaly(
        step=5,
        kind="state_spike",
        since=3,
        ranks=(0, 1),
        layer="layers.1",
        cause="data",
        explanation="the loss rose to 3",
        suggestion="leave out the row",
        where="weight",
        name="layers.1.mlp",
        device="cuda:0",
        fingerprints=("1a", "2b"),
        micro_batch=1,
        rows=(2,),
        indices=(30, 31),
        is_replay_exact=True,
        replay="reproduced",
        replay_detail="transient",
        num_clean_replays=1,
        samples=(BadRow(**row, text="a row"),),
        samples_detail="by halves",
        are_samples_exact=False,
        gradients=(GroupNorm(name="layers.1", rank=1, norm=9.0, usual_norm=1.0),),
        num_groups=1,
        weights=(StateNorm(kind="weight", name="w", norm=9.0, norm_before=1.0, rise=9.0),),
        states=(StateNorm(kind="exp_avg", name="w", norm=9.0, norm_before=1.0, rise=9.0),),
        moved=("w",),
        buffers=("b",),
        losses=(3.0, 1.0),
        usual_loss=1.0,
        learning_rate=0.1,
        global_norm=9.0,
        usual_global_norm=1.0,
        loss_scale=1024.0,
        skipped=False,
        consecutive_skips=0,
    ).as_record()
    end = {
        "step": 5,
        "kind": "state_spike",
        "last_step": 8,
        "num_steps": 3,
        "num_skipped": 1,
        "latest": "norm 12",
        "diverged": "the loss has not come back",
    }
    note = {
        "step": 1,
        "kind": "note",
        "ranks": [0],
        "cause": "first_loss",
        "explanation": "the first loss is high",
        "suggestion": "look at the labels",
    }
    write_lines(folder / "anomalies.jsonl", [note, anomaly, end])
    write_lines(folder / "anomalies_rank1.jsonl", [anomaly | {"ranks": [1]}])
    rollback = {
        "kind": "spike",
        "first_step": 9,
        "last_step": 10,
        "checkpoint": "checkpoint-8",
        "rows": [[0, 7]],
        "description": "a spike",
        "rate_factor": 0.5,
        "slow_updates": 2,
    }
    content = {"format_version": 1, "pending": None, "rollbacks": [rollback]}
    _write(folder / "rollbacks.json", content)
    facts = {
        "format_version": 1,
        "command": "train.py",
        "started": "2026-01-01T00:00:00+00:00",
        "hardware": {"name": "cpu", "ranks": 2, "devices": ["cpu"]},
        "versions": {"torch": "2.13.0"},
        "model": "Llama",
        "parameters": {"total": 1000, "trainable": 900},
        "configuration": {"training": {"seed": 0, "betas": [0.9, 0.95]}},
        "state": "finished",
        "seconds": 12.5,
    }
    _write(folder / "run.json", facts)
    write_lines(
        folder / "progress.jsonl",
        [{"step": step, "seconds": step / 2, "tokens": 100 * step} for step in range(2, 13, 2)],
    )
    said = [
        {
            "step": step,
            "prompt": 0,
            "averaged": averaged,
            "input": "2 + 2 =",
            "reference": "4",
            "image": "iVBORw0KGgo=",
            "text": str(step),
            "seconds": 0.5,
        }
        for step in (0, 10)
        for averaged in (False, True)
    ]
    write_lines(folder / "samples.jsonl", said)
    memory = {
        "memory_allocated": 10,
        "max_memory_allocated": 20,
        "max_memory_reserved": 30,
        "max_memory_share": 0.5,
        "max_memory_section": "update",
        "num_alloc_retries": 0,
        "host_memory": 100,
        "max_host_memory": 200,
    }
    write_lines(folder / "memory.jsonl", [{"step": step, **memory} for step in (1, 2, 10)])
    return folder


def mutate(folder: Path, draw: random.Random) -> str:
    """Change one value in a file of a run folder; return what was changed."""
    paths = sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")])
    path = draw.choice(paths)
    lines = path.read_bytes().splitlines()
    number = draw.randrange(len(lines))
    content = json.loads(lines[number])
    *outer, last = draw.choice(list(_places(content)))
    target = content
    for key in outer:
        target = target[key]
    way = draw.randrange(8)
    if way == 0:
        del target[last]
        said = "deleted"
    elif way == 1:
        odd = draw.choice(_NOT_JSON)
        target[last] = "@odd@"
        lines[number] = json.dumps(content).encode().replace(b'"@odd@"', odd)
        path.write_bytes(b"\n".join(lines) + b"\n")
        return f"{path.name}, line {number + 1}: {[*outer, last]} is {odd[:20]!r}"
    else:
        target[last] = draw.choice(ODD_VALUES)
        said = f"is {target[last]!r:.60}" if not isinstance(target[last], int) else "is a number"
        if isinstance(target[last], int):
            said = f"is {hex(target[last])[:30]}"
    lines[number] = json.dumps(content).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"{path.name}, line {number + 1}: {[*outer, last]} {said}"


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of each value within nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (key,)
        if isinstance(item, (dict, list)):
            yield from ((key, *rest) for rest in _places(item))


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
