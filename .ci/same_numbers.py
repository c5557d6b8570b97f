"""Check that a change alters no number: run a revision and the working tree, compare every bit.

    python .ci/same_numbers.py 18b68ba

There are three seeded runs: the causal_lm recipe for 50 steps, an MFTrainer that is stopped and
resumed, and two ranks under DistributedDataParallel. The script compares every loss, norm, learning
rate, loss scale and final tensor. In a fourth run, the working tree resumes from the checkpoint
that the revision wrote.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "same-numbers"
NUM_STEPS, STOPPED_AT = 12, 5


def digest(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return shape, dtype and the SHA-256 of the bytes of each tensor."""
    import torch

    found = {}
    for name, tensor in sorted(tensors.items()):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(raw).hexdigest()}"
    return found


def flat_state(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's tensors, keyed by "index.name"."""
    import torch

    states = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, state in states.items()
        for name, value in state.items()
    }


def record_recipe(folder: Path) -> dict[str, Any]:
    """Run the causal_lm recipe for 50 steps; return its records and the digests of its models."""
    from safetensors.torch import load_file

    command = [sys.executable, "-m", "mfwrap.recipes.causal_lm", "--max_steps", "50"]
    subprocess.run([*command, "--output_dir", str(folder), "--logging_steps", "5"], check=True)
    names = ("loss", "overflow", "loss_scale", "learning_rate", "global_norm", "local_norm")
    records = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kept = {name: record[name] for name in names if name in record}
        # Revisions differ in how they write local norms: in an object "local_norm", or each under
        # "local_norm/<group>". Convert the second form to the first, so that they can be compared.
        flat = {k: v for k, v in record.items() if k.startswith("local_norm/")}
        if flat:
            kept["local_norm"] = {k.removeprefix("local_norm/"): v for k, v in flat.items()}
        evaluations = {k: v for k, v in record.items() if k.endswith("eval_loss")}
        if kept or evaluations:
            records.append({**kept, **evaluations})
    models = {
        name: digest(load_file(folder / name / "model.safetensors"))
        for name in ("model", "model_ema")
    }
    return {"records": records, **models}


def network(seed: int) -> Any:
    """Return a small GPT-2 with dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            attn_implementation="eager",
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def rows(number: int) -> list[dict[str, Any]]:
    """Return rows of counting tokens."""
    import torch

    tokens = [(torch.arange(12) * (1 + i % 3) + i) % 32 for i in range(number)]
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def new_trainer(folder: Path, seed: int) -> Any:
    """Return an MFTrainer with clipping, a dynamic loss scale, an average and two monitors."""
    from transformers import TrainingArguments

    from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, StepConfig
    from mfwrap.callbacks import EMACallback, MFLossMonitor, TrainingStateMonitor
    from mfwrap.trainer import MFTrainer

    arguments = TrainingArguments(
        str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
        save_steps=STOPPED_AT,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        optim="adamw_torch_fused",
        log_level="error",
    )
    return MFTrainer(
        network(seed),
        arguments,
        train_dataset=rows(40),
        step=StepConfig(local_norm=True, local_norm_groups="layer"),
        ema=lambda model: ExponentialMovingAverage(model, 0.9, warmup=True),
        scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3),
        callbacks=[EMACallback(), MFLossMonitor(), TrainingStateMonitor()],
    )


def record_trainer(folder: Path, checkpoint: Path | None) -> dict[str, Any]:
    """Train, stop and resume, or only resume `checkpoint`; return the log and all final tensors."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == STOPPED_AT:
                control.should_save = control.should_training_stop = True

    if checkpoint is None:
        first = new_trainer(folder, seed=0)
        first.add_callback(Stop())
        first.train()
        checkpoint = folder / f"checkpoint-{STOPPED_AT}"
    trainer = new_trainer(folder / "resumed", seed=1)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    times = ("runtime", "per_second")
    log = [
        {name: value for name, value in entry.items() if not name.endswith(times)}
        for entry in trainer.state.log_history
    ]
    return {
        "log": log,
        "step": repr(trainer.attached.last_output),
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(flat_state(trainer.optimizer.optimizer)),
        "average": digest(trainer.ema.state_dict()["averages"]),
    }


def record_rank(out: Path) -> None:
    """Train as one of two ranks; write this rank's outputs and tensors."""
    import torch
    from accelerate import Accelerator

    from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    model, optimizer = accelerator.prepare(model, optimizer)
    ema = ExponentialMovingAverage(model, 0.9)
    cell = MFTrainOneStepCell(
        model,
        optimizer,
        use_clip_grad=True,
        max_grad_norm=0.5,
        local_norm=True,
        scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3),
        accelerator=accelerator,
        gradient_accumulation_steps=2,
        lr_scheduler=schedule,
        ema=ema,
    )
    rank, data = accelerator.process_index, rows(NUM_STEPS * 8)
    torch.manual_seed(rank)
    outputs = []
    for step in range(NUM_STEPS):
        start = step * 8 + rank * 4
        batches = [
            {name: torch.stack([row[name] for row in data[at : at + 2]]) for name in data[at]}
            for at in (start, start + 2)
        ]
        output = cell.step(batches)
        outputs.append({name: value.tolist() for name, value in output._asdict().items()})
    cell.flush()
    accelerator.wait_for_everyone()
    inner = accelerator.unwrap_model(model)
    found = {
        "outputs": outputs,
        "weights": digest(inner.state_dict()),
        "optimizer": digest(flat_state(optimizer.optimizer)),
        "average": digest(ema.state_dict()["averages"]),
    }
    out.with_suffix(f".rank{rank}").write_text(json.dumps(found), encoding="utf-8")
    accelerator.end_training()


def record_ranks(folder: Path) -> dict[str, Any]:
    """Run `record_rank` on two ranks; return the outputs and tensors of both."""
    folder.mkdir(parents=True)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    subprocess.run([*launcher, __file__, "--rank-into", str(folder / "found")], check=True)
    return {
        f"rank{rank}": json.loads((folder / f"found.rank{rank}").read_text(encoding="utf-8"))
        for rank in range(2)
    }


def package_tree(source: Path, tree: Path) -> Path:
    """Link the checkout at `source` into `tree`, with the layout of an installed package."""
    package = tree / "mfwrap"
    package.mkdir(parents=True)
    for path in [*(source / "mfwrap").iterdir(), source / "callbacks", source / "recipes"]:
        (package / path.name).symlink_to(path)
    return tree


def recorded(name: str, source: Path, *resumed: str) -> dict[str, Any]:
    """Record all runs of the checkout at `source` in a new process that imports this checkout."""
    folder = BUILD / name
    tree = package_tree(source, folder / "tree")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--record-into", str(folder), *resumed]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=folder)
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each place where two trees of values differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from differences(one[name], other[name], f"{place}/{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}/{index}")
    elif json.dumps(one) != json.dumps(other):
        yield f"{place}: {json.dumps(one)[:200]} != {json.dumps(other)[:200]}"


def count(tree: Any) -> int:
    """Return the number of values in a tree."""
    if isinstance(tree, dict | list):
        return sum(count(each) for each in (tree.values() if isinstance(tree, dict) else tree))
    return 1


def compare(revision: str) -> int:
    """Record the working tree, and the revision if it is not yet recorded; print differences."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", revision],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout.strip()
    before_file = BUILD / commit / "found.json"
    if not before_file.exists():
        checkout = BUILD / f"{commit}-checkout"
        subprocess.run(["rm", "-rf", str(checkout), str(BUILD / commit)], check=True)
        subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
        subprocess.run(["git", "checkout", "-q", commit], check=True, cwd=checkout)
        recorded(commit, checkout)
    before = json.loads(before_file.read_text(encoding="utf-8"))
    checkpoint = BUILD / commit / "trainer" / f"checkpoint-{STOPPED_AT}"
    subprocess.run(["rm", "-rf", str(BUILD / "now")], check=True)
    now = recorded("now", ROOT, "--resume-from", str(checkpoint))
    before["old checkpoint"] = before["trainer"]
    found = list(differences(before, now))
    print("\n".join(found[:40]) or f"{count(now)} values of 4 runs are bit-identical to {commit}")
    return bool(found)


def main() -> int:
    """Compare a revision with the working tree, or, with a hidden option, record runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("revision", nargs="?", help="commit to compare the working tree with")
    for name in ("--record-into", "--resume-from", "--rank-into"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_into:
        record_rank(arguments.rank_into)
    elif arguments.record_into:
        into: Path = arguments.record_into
        found = {
            "recipe": record_recipe(into / "recipe"),
            "trainer": record_trainer(into / "trainer", None),
            "ranks": record_ranks(into / "ranks"),
        }
        if arguments.resume_from:
            found["old checkpoint"] = record_trainer(into / "old", arguments.resume_from)
        (into / "found.json").write_text(json.dumps(found), encoding="utf-8")
    else:
        return compare(arguments.revision)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
