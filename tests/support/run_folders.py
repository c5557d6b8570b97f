"""Write run folders with known numbers."""

import json
import math
from pathlib import Path
from typing import Any

__all__ = ["ANOMALIES", "GROUPS", "write_lines", "write_run", "write_trainer_run"]

GROUPS = ("embed", "layers.0", "layers.1")
ANOMALIES: tuple[dict[str, Any], ...] = (
    {
        "step": 30,
        "kind": "gradient_not_finite",
        "ranks": [1],
        "layer": "layers.1",
        "where": "gradient",
        "name": "layers.1.mlp",
        "micro_batch": 2,
        "gradients": [{"name": "layers.1", "rank": 1, "norm": "nan", "usual_norm": 0.5}],
        "skipped": True,
    },
    {
        "step": 12,
        "kind": "spike",
        "ranks": [0],
        "layer": "<script>alert(1)</script>",
        "global_norm": 40.0,
        "gradients": [{"name": "embed", "rank": 0, "norm": 39.0, "usual_norm": 0.5}],
        "skipped": False,
    },
)


def write_lines(path: Path, records: Any) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def norms(step: int, rank: int) -> dict[str, float]:
    """Return local norms that differ for each step, group and rank."""
    return {name: (i + 1) * (rank + 1) / step for i, name in enumerate(GROUPS)}


def write_run(folder: Path, num_steps: int = 40, num_ranks: int = 1) -> Path:
    """Write a run folder as a run with the cell does; step 20 overflows with a non-finite loss."""
    records: list[dict[str, Any]] = [{"step": 0, "eval_loss": 5.0}]
    for step in range(1, num_steps + 1):
        bad = step == 20
        records.append(
            {
                "step": step,
                "loss": "nan" if bad else 4 * math.exp(-step / 20),
                "overflow": bad,
                "loss_scale": 1024.0 if step < 20 else 512.0,
                "learning_rate": step / 1000,
                "global_norm": "inf" if bad else 1 + 1 / step,
                "local_norm": {**norms(step, 0)} if not bad else dict.fromkeys(GROUPS, "nan"),
                "throughput": 100.5 + step,
                "weight_norm": 7.5,
                "max_grad_norm": 1.5,
            }
        )
    records.append({"step": num_steps, "eval_loss": 1.25, "ema_eval_loss": 1.125})
    write_lines(folder / "metrics.jsonl", records)
    for rank in range(1, num_ranks):
        lines = [{"step": s, "local_norm": norms(s, rank)} for s in range(1, num_steps + 1)]
        write_lines(folder / f"metrics_rank{rank}.jsonl", lines)
    write_lines(folder / "anomalies.jsonl", ANOMALIES)
    return folder


def write_trainer_run(folder: Path) -> Path:
    """Write a run folder as a stock Trainer does, with its log in the checkpoints."""
    for last in (4, 8, 10):
        log: list[dict[str, Any]] = [
            {
                "step": step,
                "epoch": step / 4,
                "loss": 3.0 / step,
                "grad_norm": 2.0,
                "learning_rate": 0.1,
                "loss_scale": 1.0,
                "overflows": step // 4,
                "skipped_updates": step // 4,
                "local_norm/embed": 0.5 * step,
            }
            for step in range(2, last + 1, 2)
        ]
        log.append({"step": last, "eval_loss": 1.0 / last, "eval_runtime": 0.1})
        log.append({"step": last, "train_runtime": 3.0, "train_loss": 9.0})
        checkpoint = folder / f"checkpoint-{last}"
        checkpoint.mkdir(parents=True)
        state = {"global_step": last, "log_history": log}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder
