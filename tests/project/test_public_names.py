"""The names that users import, and where they import them from."""

import importlib
import subprocess
import sys

import pytest

CELLS = """
    MFTrainOneStepCell TrainOneStepWithLossScaleCell TrainOneStepCell WithLossCell StepConfig
    StepOutput LocalNormStepOutput StepReport FixedLossScaleUpdateCell DynamicLossScaleUpdateCell
    AdaptiveLossScaleUpdateCell LossScaleManager FixedLossScaleManager DynamicLossScaleManager
    StaticLossScaler DynamicLossScaler all_finite clip_by_global_norm clip_by_value grad
    value_and_grad GradOperation ExponentialMovingAverage Model DeferredReads
    pipeline_stages AdamWeightDecay ChainedOptimizer
"""
CALLBACKS = """
    MFLossMonitor TrainingStateMonitor CheckpointMonitor EMACallback EvalCallback ProfileMonitor
    LossMonitor TimeMonitor ModelCheckpoint CheckpointConfig Callback EarlyStopping
    ReduceLROnPlateau History LambdaCallback LearningRateScheduler LocalNormMonitor ReplicaCheck
    RankClock newest_healthy_checkpoint RunContext as_trainer_callback
"""
SCHEDULES = """
    SCHEDULES ConstantWarmUpLR ConstantWithCoolDownLR LinearWithWarmUpLR CosineWithWarmUpLR
    CosineWithRestartsAndWarmUpLR PolynomialWithWarmUpLR WarmUpStableDecayLR CosineAnnealingLR
    CosineAnnealingWarmRestarts GroupedLR
"""
PUBLIC = {
    "mfwrap": CELLS,
    "mfwrap.accelerate": "attach AttachedStep",
    "mfwrap.callbacks": CALLBACKS,
    "mfwrap.deepspeed": "DeepSpeedCell",
    "mfwrap.loss_scale": "FixedLossScaleUpdateCell DynamicLossScaleUpdateCell",
    "mfwrap.model": "Model Callback RunContext as_trainer_callback named_output",
    "mfwrap.optimizers": "AdamWeightDecay ChainedOptimizer hidden_matrices",
    "mfwrap.recipe": "Recipe load_recipe parse_recipe run_recipe RunResult import_mindformers",
    "mfwrap.records": "read_json_lines",
    "mfwrap.report": "write_run_page",
    "mfwrap.schedules": SCHEDULES,
    "mfwrap.sharded_checkpoint": "save_sharded load_sharded",
    "mfwrap.trainer": "MFTrainer MFTrainerMixin",
}
"""Names by the module that users import them from."""

SCRIPTS = ("causal_lm", "accelerate_loop", "lenet")


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there(module):
    """Each public name can be imported from its documented module."""
    imported = importlib.import_module(module)

    assert [name for name in PUBLIC[module].split() if not hasattr(imported, name)] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_packages_list_their_names(module):
    """Each name in `__all__` can be imported."""
    imported = importlib.import_module(module)

    assert [name for name in imported.__all__ if not hasattr(imported, name)] == []


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run_by_their_module(script, tmp_path):
    """`python -m` finds each script and prints its help."""
    command = [sys.executable, "-m", f"mfwrap.recipes.{script}", "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert shown.stdout.startswith("usage:")
