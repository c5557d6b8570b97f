"""`DeepSpeedCell` reports the values of DeepSpeed's engine, and refuses unsupported settings."""

import math
import os
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from mfwrap import MFTrainOneStepCell, StepConfig, TrainOneStepCell
from mfwrap.deepspeed import DeepSpeedCell
from mfwrap.trainer import MFTrainer

deepspeed = pytest.importorskip("deepspeed")

INF = math.inf
BFLOAT16 = {"bf16": {"enabled": True}}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}


class Product(nn.Module):
    """A network whose loss has the mean of the inputs as its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return (self.w * x).sum(dim=1).mean()


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory):
    """Provide a process group of one process, without compiled operators in DeepSpeed."""
    store = distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    operators = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    with (
        mock.patch.dict(os.environ, ALONE),
        mock.patch.dict(deepspeed.ops.__compatible_ops__, operators),
    ):
        distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        yield
        distributed.destroy_process_group()


def new_engine(**settings):
    """Return an engine with SGD at rate 0.5, whose schedule halves the rate at each update."""
    network = Product()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 100.0,
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        config=config,
        dist_init_required=False,
    )
    return engine


def test_the_tuple_is_the_engines():
    """The output holds the engine's loss, overflow, scale, rate and unclipped norm."""
    cell = DeepSpeedCell(new_engine(**BFLOAT16), StepConfig(use_clip_grad=True, max_grad_norm=100))
    outputs = [
        cell(torch.tensor([values], dtype=torch.bfloat16))
        for values in ([3.0, 4.0], [INF, 4.0], [0.0, 2.0])
    ]

    assert [output.loss.item() for output in outputs] == [11.0, -INF, 0.0]
    assert [output.overflow.item() for output in outputs] == [False, True, False]
    assert [output.loss_scale.item() for output in outputs] == [1.0, 1.0, 1.0]
    # A skipped update does not step the schedule.
    assert [output.learning_rate.item() for output in outputs] == [0.5, 0.25, 0.25]
    assert [output.global_norm.item() for output in outputs] == [5.0, INF, 2.0]
    assert [weight.tolist() for weight in cell.engine.module.parameters()] == [[-0.5, -0.5]]
    for value in outputs[0]:
        assert value.shape == ()
        assert value.dtype in {torch.float32, torch.bool}


def test_micro_batches():
    """An update uses the mean of its micro-batches; a wrong number of micro-batches raises."""
    batch = torch.tensor([[2.0, 4.0], [4.0, 4.0]], dtype=torch.bfloat16)
    engine = new_engine(gradient_accumulation_steps=2, **BFLOAT16)
    cell = DeepSpeedCell(engine, StepConfig(use_clip_grad=True, max_grad_norm=100))
    first, second = cell(batch), cell.step(list(batch.split(1)))

    assert (first.loss.item(), first.global_norm.item()) == (11.0, 5.0)
    assert (first.learning_rate.item(), second.learning_rate.item()) == (0.5, 0.25)
    assert engine.global_steps == 2
    with pytest.raises(ValueError, match=r"`micro_batches` must hold 2 micro-batches, .* got 1"):
        cell.step([batch])


def test_without_clipping_the_norm_is_absent():
    """The global norm is None without ``use_clip_grad``."""
    cell = DeepSpeedCell(new_engine(**BFLOAT16))

    assert cell(torch.ones(1, 2, dtype=torch.bfloat16)).global_norm is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_norm": True}, "`local_norm` must be False with DeepSpeed"),
        (
            {"use_skip_data_by_global_norm": True, "use_clip_grad": True, "max_grad_norm": 100},
            "`use_skip_data_by_global_norm` must be False with DeepSpeed",
        ),
        ({"calculate_per_token_loss": True}, "`calculate_per_token_loss` must be False with"),
        ({"spike_policy": "clip"}, '`spike_policy` must be "record" with DeepSpeed'),
        ({"sync_each_batch": True}, "`sync_each_batch` must be False with DeepSpeed"),
        ({"gradient_accumulation_steps": 3}, "`gradient_accumulation_steps` must be 1, as in the"),
        ({"use_clip_grad": True}, "`max_grad_norm` must be 100.0, as the engine's"),
    ],
)
def test_what_the_engine_does_not_allow(settings, message):
    """A setting that the engine does not support raises an error that names it."""
    engine = new_engine(**BFLOAT16)
    with pytest.raises(ValueError, match=message):
        DeepSpeedCell(engine, StepConfig(**settings))


def test_an_engine_that_applies_anything():
    """An engine in float32 without ZeRO, which has no overflow check, raises an error."""
    with pytest.raises(ValueError, match="`engine` must train in bfloat16, in float16 or under"):
        DeepSpeedCell(new_engine())


def test_wrong_types():
    """Arguments of a wrong type raise a TypeError that names the argument."""
    with pytest.raises(TypeError, match=r"`engine` must be a deepspeed\.DeepSpeedEngine, got Prod"):
        DeepSpeedCell(Product())
    with pytest.raises(TypeError, match="`config` must be a StepConfig or None, got 1"):
        DeepSpeedCell(new_engine(**BFLOAT16), 1)


@pytest.mark.parametrize("kind", [MFTrainOneStepCell, TrainOneStepCell])
def test_cells_refuse_an_engine(kind):
    """Cells with their own update raise an error for an engine and change no weight."""
    engine = new_engine(**BFLOAT16)
    before = [weight.clone() for weight in engine.module.parameters()]
    with pytest.raises(TypeError, match="`network` must not be an engine of DeepSpeed, whose own"):
        kind(engine, torch.optim.SGD(engine.module.parameters(), lr=0.1))

    assert all(map(torch.equal, before, engine.module.parameters()))


def test_the_trainer_refuses_it(tmp_path):
    """``MFTrainer`` with DeepSpeed raises an error at construction."""
    arguments = TrainingArguments(
        str(tmp_path),
        report_to="none",
        use_cpu=True,
        deepspeed={"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}},
    )
    try:
        with pytest.raises(ValueError, match="got DeepSpeed, which updates within its own"):
            MFTrainer(Product(), arguments)
    finally:
        unset_hf_deepspeed_config()
