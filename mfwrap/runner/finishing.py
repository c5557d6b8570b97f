"""Evaluate, save and push the weights that the training of a recipe ends with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mfwrap.accelerate.attributes import replaced
from mfwrap.callbacks.metrics_recorder import MetricsRecorder
from mfwrap.checkpoints.run_folders import step_of_checkpoint
from mfwrap.checkpoints.whole import whole_file, whole_folder
from mfwrap.collectives import gather_objects
from mfwrap.records.evaluations import AVERAGED, last_has_averages, noted_results, results_of
from mfwrap.records.run_record import TRAINER_STATE
from mfwrap.runner.averages import average_of, best_checkpoint
from mfwrap.runner.folder import AVERAGED_MODEL, MODEL
from mfwrap.runner.model_card import Best, FinishedRun, write_recipe_card
from mfwrap.runner.pushing import push_models
from mfwrap.runner.recipe import Recipe
from mfwrap.tensors.samples import sampled_hash, tensors_of


def finish(
    recipe: Recipe,
    trainer: Any,
    recorder: MetricsRecorder,
    say: Callable[[str], None] = lambda _: None,
) -> FinishedRun:
    """Evaluate, save and push the raw weights, and the averaged weights if there is an average.

    The results are recorded at the step of the weights, which is not the last one if the Trainer
    has loaded its best checkpoint.

    Args:
        recipe: The recipe, whose run folder gets ``model`` and ``model_ema``.
        trainer: Its Trainer after the training.
        recorder: Callback that records the metrics.
        say: Called in the main process with a line that names the best checkpoint.
    """
    _keep_log(trainer)
    average, best = average_of(trainer), _best_of(trainer)
    step = trainer.state.global_step if best is None else best.step
    is_shared = average is not None and average.step == step
    if best is not None and trainer.is_world_process_zero():
        says = f"{MODEL} and {AVERAGED_MODEL} are those" if is_shared else f"{MODEL} is that"
        say(f"{says} of {best.checkpoint}, the best by {best.metric}")
    metrics: dict[str, float] = {}
    results = {step: _evaluated(trainer, step)}
    metrics |= results[step]
    run = FinishedRun(recipe, trainer, average, metrics, best)
    if average is not None:
        with average.weights.swap():
            averaged = _evaluated(trainer, average.step, AVERAGED)
            metrics |= averaged
            results[average.step] = {**results.get(average.step, {}), **averaged}
            _save_model(run, AVERAGED_MODEL)
    # Saved last, because its card has the results of both evaluations.
    _save_model(run, MODEL)
    for at, found in results.items():
        recorder.write_evaluation(at, found)
    if recipe.arguments.push_to_hub:
        push_models(run)
    return run


def _keep_log(trainer: Any) -> None:
    """Write the log of the training: the checkpoints that are left may be older than its end."""
    if trainer.is_world_process_zero():
        names = ("best_model_checkpoint", "best_metric", "global_step", "log_history", "max_steps")
        state = {name: getattr(trainer.state, name) for name in names}
        with whole_file(Path(trainer.args.output_dir or "") / TRAINER_STATE) as partial:
            partial.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def _best_of(trainer: Any) -> Best | None:
    """Return the checkpoint that the Trainer has loaded at the end; ``None`` if it loaded none."""
    checkpoint = best_checkpoint(trainer)
    if checkpoint is None:
        return None
    step, metric = step_of_checkpoint(checkpoint), trainer.args.metric_for_best_model
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    log = [entry for entry in trainer.state.log_history if entry.get("step") == step]
    metric = f"{AVERAGED}{metric}" if last_has_averages(log) else metric
    return Best(checkpoint.name, step, metric)


def _evaluated(trainer: Any, step: int, prefix: str = "") -> dict[str, Any]:
    """Return the results of the weights in the model; nothing without held-out rows.

    If the training itself has evaluated these weights after its last step, its results are taken: a
    second evaluation takes time, and one that draws answers has other results.

    Args:
        trainer: The Trainer after the training.
        step: Step of the weights. Callbacks and trackers see the evaluation at this step.
        prefix: ``"ema_"`` for averaged weights.
    """
    if trainer.eval_dataset is None:
        return {}
    noted = None
    if step == trainer.state.global_step:
        # Callbacks of the user's own may have changed the weights since.
        noted = noted_results(trainer.state, prefix, sampled_hash(tensors_of(trainer.model)))
    is_known = all(gather_objects(noted is not None))
    if noted is not None and is_known:
        return results_of(noted, prefix)
    with replaced(trainer.state, global_step=step):
        return results_of(trainer.evaluate(), prefix)


def _save_model(run: FinishedRun, name: str) -> None:
    """Save a model on every rank; the folder is complete or absent, also after a crash.

    The Trainer does not push it: it would push the run folder, and with each model again.
    """
    trainer, folder = run.trainer, Path(run.recipe.arguments.output_dir or "") / name
    if trainer.args.should_save:
        with whole_folder(folder) as written:
            trainer.save_model(str(written), _internal_call=True)
            write_recipe_card(run, name, written)
    else:
        # The other ranks write nothing, but they may have to send shards of the weights.
        trainer.save_model(str(folder), _internal_call=True)
