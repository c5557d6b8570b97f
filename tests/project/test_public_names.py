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
    RankClock RecomputeCheck MemoryMonitor SampleMonitor newest_healthy_checkpoint RunContext
    as_trainer_callback
    PyNativeCallback adapt_pynative is_pynative_callback
"""
SCHEDULES = """
    SCHEDULES ConstantWarmUpLR ConstantWithCoolDownLR LinearWithWarmUpLR CosineWithWarmUpLR
    CosineWithRestartsAndWarmUpLR PolynomialWithWarmUpLR WarmUpStableDecayLR CosineAnnealingLR
    CosineAnnealingWarmRestarts GroupedLR BatchGrowth
"""
PUBLIC = {
    "mfwrap": CELLS,
    "mfwrap.accelerate": "attach AttachedStep",
    "mfwrap.callbacks": CALLBACKS,
    "mfwrap.loss_scale": "FixedLossScaleUpdateCell DynamicLossScaleUpdateCell",
    "mfwrap.model": "Model Callback RunContext as_trainer_callback named_output",
    "mfwrap.optimizers": "AdamWeightDecay ChainedOptimizer hidden_matrices",
    "mfwrap.runner": "Recipe load_recipe parse_recipe run_recipe RunResult import_mindformers",
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


@pytest.mark.parametrize(
    "statement",
    ["import mfwrap", "import mfwrap.cli", "import mfwrap; dir(mfwrap); mfwrap.__version__"],
)
def test_the_command_line_starts_without_torch(statement):
    """The package and the command line load torch only for what needs it."""
    pytest.importorskip("click", reason="needs click")
    code = f"{statement}; import sys; print('torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-Pc", code], capture_output=True, text=True, check=True
    )

    assert shown.stdout.strip() == "False"


def test_the_help_needs_no_torch():
    """`mfwrap --help` shows its text in a process that cannot import torch."""
    pytest.importorskip("click", reason="needs click")
    code = "import sys; sys.modules['torch'] = None; from mfwrap.cli import main; main()"
    command = [sys.executable, "-Pc", code, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)

    assert "mfwrap train" in shown.stdout


def test_a_name_that_was_used_is_a_plain_attribute():
    """A public name is resolved once; an unknown one is an AttributeError."""
    mfwrap = importlib.import_module("mfwrap")
    from mfwrap.step.cell import MFTrainOneStepCell  # noqa: PLC0415  (imports the name's home)

    assert mfwrap.MFTrainOneStepCell is MFTrainOneStepCell
    assert vars(mfwrap)["MFTrainOneStepCell"] is MFTrainOneStepCell
    assert {"MFTrainOneStepCell", "Model", "grad"} <= set(dir(mfwrap))
    with pytest.raises(AttributeError, match="has no attribute 'MFTrainOneStepCel'"):
        _ = mfwrap.MFTrainOneStepCel
