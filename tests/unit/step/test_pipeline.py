"""The cell trains pipelines of torch.distributed.pipelining as one process trains the network."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mfwrap import MFTrainOneStepCell, StepConfig, WithLossCell
from mfwrap.compatibility.foreign import is_installed
from mfwrap.step import pipeline
from mfwrap.step.pipeline import PipelineAccumulation, pipeline_stages
from support.attached_runs import new_accelerator
from support.one_rank import one_rank
from support.ranks.pipeline_faults import (
    act_after_update,
    change_batches,
    freeze_first,
    group_norms,
    set_bad_rates,
    train_lone_pipelines,
    use_gloo_of_old_torch,
)
from support.ranks.pipelines import (
    BAD_STEP,
    Case,
    costs_of,
    disagree,
    disagree_about_replicas,
    freeze,
    train_pipeline,
    train_whole,
)
from support.ranks.pool import RankPool
from support.versions import needs

CASES = {
    "1F1B": Case(),
    "1F1B, sums": Case(scale_grads=False),
    "GPipe, per token": Case(schedule="GPipe", num_micro_batches=4, per_token=True),
    "interleaved": Case(schedule="Interleaved1F1B", stages_per_rank=2),
    "breadth first": Case(schedule="LoopedBFS", stages_per_rank=2, per_token=True),
    "zero bubble": Case(schedule="InterleavedZeroBubble", stages_per_rank=2, num_micro_batches=4),
    "zero bubble V": Case(
        schedule="ZBVZeroBubble", stages_per_rank=2, is_v_shaped=True, num_micro_batches=4
    ),
    "dual pipe V": Case(
        schedule="DualPipeV", stages_per_rank=2, is_v_shaped=True, num_micro_batches=4
    ),
}
FAST = {"1F1B", "interleaved"}
OWN_MESSAGES = needs("torch", "2.13", "gloo that can send to its own rank")


@pytest.fixture
def two_stages_ranks(two_ranks):
    """Two ranks whose stages can send to each other."""
    if not is_installed("torch", "2.10"):
        pytest.skip("needs torch 2.10: stages that send over gloo")
    return two_ranks


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.slow] * (name not in FAST) + [OWN_MESSAGES] * case.is_v_shaped,
        )
        for name, case in CASES.items()
    ],
)
def test_equal_to_one_process(two_stages_ranks, name):
    """Two ranks make the updates that one process makes with the whole network."""
    case = CASES[name]
    expected = train_whole(case)
    for rank in two_stages_ranks.run(train_pipeline, asdict(case)):
        assert_equal(rank, expected)
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-6, nan_ok=True)
        for own, whole in zip(rank["local_norms"], expected["local_norms"], strict=True):
            assert own == pytest.approx({name: whole[name] for name in own}, rel=1e-5, nan_ok=True)


def assert_equal(rank, expected):
    """Assert that a rank of a pipeline has made the updates of the whole network."""
    for exact in ("overflows", "scales", "counts"):
        assert rank[exact] == expected[exact]
    assert rank["overflows"][BAD_STEP]
    assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-6, nan_ok=True)
    for own, whole in zip(rank["states"], expected["states"], strict=True):
        floating = [name for name, value in own.items() if value.is_floating_point()]
        weights = [name for name in floating if name.startswith(("/network", "/Exponential"))]
        assert weights
        for name in weights:
            torch.testing.assert_close(own[name], whole[name], rtol=1e-6, atol=1e-6, msg=name)
    before, after = rank["states"][BAD_STEP - 1 : BAD_STEP + 1]
    for name, value in before.items():
        # The number of calls counts skipped updates, too.
        assert torch.equal(value, after[name]) or name.endswith("num_calls"), name


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Start four processes that are the ranks of two pipelines."""
    with RankPool(4, tmp_path_factory.mktemp("four_ranks")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process_with_replicas(four_ranks, name, data):
    """Two pipelines with averaged gradients make the updates of one process with all data."""
    case = CASES[name].with_data(data)
    if data == "ddp" and ("zero" in name or "dual" in name):
        with pytest.raises(RuntimeError, match="must not be wrapped in DistributedDataParallel"):
            four_ranks.run(train_pipeline, asdict(case))
        return
    expected = train_whole(case, (0, 1))
    for number, rank in enumerate(four_ranks.run(train_pipeline, asdict(case))):
        assert_equal(rank, expected)
        # Losses and local norms are those of this rank's own pipeline.
        own = train_whole(replace(case, data=""), (number % 2,))
        assert rank["losses"][0] == pytest.approx(own["losses"][0], rel=1e-6)
        norms = own["local_norms"][0]
        assert rank["local_norms"][0] == pytest.approx(
            {name: norms[name] for name in rank["local_norms"][0]}, rel=1e-5
        )


def test_a_step_adds_one_message_and_no_read(two_stages_ranks):
    """Norms, loss, rates and targets travel in one all-reduce of five numbers; nothing is read."""
    assert two_stages_ranks.run(costs_of) == [{"messages": [5], "reads": []}] * 2


def test_a_stage_that_is_frozen_later(two_stages_ranks):
    """A rank without gradients takes part in the updates of the others."""
    first, second = two_stages_ranks.run(freeze)

    assert first["norms"] == second["norms"]
    assert first["local_norms"].shape == (0,)
    assert second["local_norms"].norm().item() == pytest.approx(first["norms"][1], rel=1e-6)
    assert [first["changed"], second["changed"]] == [False, True]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stage_that_is_frozen_at_construction(two_stages_ranks, frozen):
    """The other stage is trained, and both ranks have the norm of its gradients."""
    first, second = two_stages_ranks.run(freeze_first, frozen)

    assert first[0] == second[0] > 0
    assert [first[1], second[1]] == [frozen == 1, frozen == 0]


def test_a_bad_rate_skips_the_update_of_all_stages(two_stages_ranks):
    """If one stage has a rate of NaN, no stage is updated; the loss scale stays as it is."""
    for rank in two_stages_ranks.run(set_bad_rates):
        expected = {"skipped": True, "changed": False, "overflow": False, "loss_scale": 1024.0}
        assert rank == [expected] * 2


def test_groups_of_norms_name_own_stages(two_stages_ranks):
    """A pattern may match stages of other ranks only, and the ranks may have other patterns."""
    for rank, names in enumerate(two_stages_ranks.run(group_norms)):
        assert names == [(f"stage_{rank}",), (f"stage_{rank}.*weight",)]


def test_batches_of_other_shapes_are_refused_on_all_ranks(two_stages_ranks):
    """Torch allocates buffers in the first step. No rank begins a step with another batch."""
    first, second = two_stages_ranks.run(change_batches)

    assert first[:3] == second[:3]
    assert first[0] == (
        "the first dimension of `inputs` must be a multiple of the schedule's 2 micro-batches, got "
        "shape (3, 4)"
    )
    assert first[1:] == [
        "the batches of a pipeline must have the same shapes in all steps, got `inputs` of shape "
        f"({rows}, 4) after shape (4, 4) in the first step; use drop_last=True in the data loader, "
        "and pad to one length"
        for rows in (6, 2, 2)
    ]
    assert "got `target` of 2 rows after 4 rows in the first step" in second[3]


@pytest.mark.slow
def test_pipelines_that_nothing_joins(four_ranks):
    """Each rank of two pipelines without replicas is warned that its pipeline trains alone."""
    for rank, caught in enumerate(four_ranks.run(train_lone_pipelines)):
        [warning] = caught
        assert f"so its ranks [{rank % 2}, {rank % 2 + 2}] train, clip and skip alone" in warning


def test_gloo_that_aborts_is_refused(two_ranks):
    """With torch 2.9, a pipeline over gloo is refused at construction, on all ranks."""
    errors = two_ranks.run(use_gloo_of_old_torch)

    assert errors[0] == errors[1]
    assert errors[0].startswith("a pipeline over gloo needs torch 2.10 or newer, got ")


def test_what_acts_after_an_update(two_stages_ranks):
    """What needs the forward passes of the whole network is refused, on all ranks."""
    for error in two_stages_ranks.run(act_after_update):
        assert error.startswith("_Nothing must have the whole network on each rank, got a stage of")


def test_ranks_that_disagree(two_stages_ranks):
    """Before the first update, both ranks raise the same error."""
    first, second = two_stages_ranks.run(disagree)

    assert first == second
    assert "max_consecutive_skips is 10 on rank 0 but 11 on rank 1" in first[0]
    assert "pipeline: scale_grads is True on rank 0 but False on rank 1" in first[1]


@pytest.mark.slow
def test_a_stage_without_replicas_is_refused(four_ranks):
    """If only some stages average their gradients, all ranks raise the same error."""
    errors = four_ranks.run(disagree_about_replicas)

    assert "average a stage's gradients is 2 on rank 0 but 1 on rank 2" in errors[0]
    assert "average a stage's gradients is 2 on rank 1 but 1 on rank 3" in errors[1]


@pytest.fixture(scope="module")
def _group_of_one():
    """Make this process the only rank of a process group for all tests that ask for it."""
    with one_rank():
        yield


def mean_square(output, target):
    """Return the mean of the squared differences."""
    return (output - target).square().mean()


def one_stage(module=None, kind=ScheduleGPipe, loss_fn=mean_square):
    """Return a schedule of two micro-batches, with one stage that is the whole network."""
    module = nn.Linear(2, 1) if module is None else module
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    return kind(stage, n_microbatches=2, loss_fn=loss_fn)


def two_stages(module, kind, group=None):
    """Return a schedule of two micro-batches, whose two stages are both on this rank."""
    cpu = torch.device("cpu")
    stages = [
        PipelineStage(nn.Linear(2, 2), 0, 2, cpu),
        PipelineStage(module, 1, 2, cpu, group=group),
    ]
    return kind(stages, n_microbatches=2, loss_fn=mean_square)


def sgd(schedule):
    """Return an optimizer of a schedule's stages."""
    return SGD(pipeline_stages(schedule).parameters(), lr=0.1)


@pytest.mark.usefixtures("_group_of_one")
class TestOneRank:
    """A schedule needs no second rank."""

    def test_the_stages_have_names(self):
        """The names of parameters begin with the number of the stage."""
        names = dict(pipeline_stages(one_stage()).named_parameters())

        assert list(names) == ["stage_0.weight", "stage_0.bias"]
        with pytest.raises(TypeError, match="must be a schedule of torch"):
            pipeline_stages(nn.Linear(2, 1))

    def test_a_rank_without_parameters(self):
        """A rank needs a parameter in one of its stages; a stage needs none."""
        stages = pipeline_stages(two_stages(nn.ReLU(), ScheduleInterleaved1F1B))
        assert len(list(stages.parameters())) == 2

        with pytest.raises(ValueError, match=r"^stage_0 of this rank must have a parameter for"):
            pipeline_stages(one_stage(nn.ReLU()))

    @pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
    def test_an_error_of_the_loss_does_not_reach_the_next_step(self, kind):
        """After an error in the second micro-batch, a step is that of a schedule without it."""
        fails = [False]

        def loss_fn(output, target):
            if fails[0] and target[0] > 0:
                msg = "the batch is damaged"
                raise ValueError(msg)
            return mean_square(output, target)

        torch.manual_seed(0)
        network = nn.Linear(2, 1)
        schedule = one_stage(network, kind, loss_fn)
        reference = nn.Linear(2, 1)
        reference.load_state_dict(network.state_dict())
        whole = WithLossCell(reference, nn.MSELoss())
        expected = MFTrainOneStepCell(
            whole, SGD(reference.parameters(), lr=0.1), gradient_accumulation_steps=2
        )
        cell = MFTrainOneStepCell(schedule, sgd(schedule))
        inputs, target = torch.randn(4, 2), torch.tensor([[-1.0], [-2.0], [3.0], [4.0]])

        for fails[0] in (False, True, False):
            if fails[0]:
                with pytest.raises(ValueError, match="damaged"):
                    cell(inputs, target=target)
                continue
            assert cell(inputs, target=target).loss == expected(inputs, target).loss

        torch.testing.assert_close(network.weight, reference.weight, rtol=1e-6, atol=1e-6)

    def test_evaluation_between_steps_is_not_scaled(self):
        """Outside of a step, the schedule's losses and gradients are its own."""
        schedule = one_stage()
        cell = MFTrainOneStepCell(schedule, sgd(schedule), scale_sense=1024.0)
        inputs, target = torch.randn(4, 2), torch.zeros(4, 1)
        cell(inputs, target=target)
        losses: list[torch.Tensor] = []
        output = schedule.eval(inputs, target=target, losses=losses)

        assert schedule.scale_grads
        torch.testing.assert_close(torch.stack(losses).mean(), output.square().mean())

    @pytest.mark.parametrize(
        ("arguments", "keywords", "error", "message"),
        [
            ((3,), {"target": 4}, ValueError, "`inputs` must be a multiple .* 2 micro-batches"),
            ((0,), {"target": 0}, ValueError, r"`inputs` must be .* got shape \(0, 2\)"),
            ((4,), {"target": 3}, ValueError, "`target` must be a multiple"),
            ((4,), {"target": 4, "x": 3}, ValueError, "`keywords` must be a multiple"),
            ((4,), {}, ValueError, "needs `target` on the rank of the last stage"),
            ((4,), {"target": 4, "losses": 4}, TypeError, "takes no 'losses'"),
        ],
    )
    def test_bad_batches(self, arguments, keywords, error, message):
        """A batch that the schedule cannot split, or an argument it does not take, is refused."""
        schedule = one_stage()
        cell = MFTrainOneStepCell(schedule, sgd(schedule))

        with pytest.raises(error, match=message):
            cell(*[torch.ones(n, 2) for n in arguments], **rows(keywords))

    def test_several_micro_batches_are_refused(self):
        """`step` takes the whole batch, which the schedule splits itself."""
        schedule = one_stage()
        cell = MFTrainOneStepCell(schedule, sgd(schedule))
        batch = {"target": torch.ones(4, 1)}

        with pytest.raises(ValueError, match="takes one whole batch"):
            cell.step([batch, batch])

    @needs("torch", "2.10", "Tensor.grad_dtype")
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize(
        ("scale_grads", "per_token", "expected"),
        [(True, False, 40000.0), (False, False, None), (True, True, 20000.0)],
        ids=["mean", "sum", "per token"],
    )
    def test_sums_of_float16_gradients(self, fused, scale_grads, per_token, expected):
        """A mean that float16 holds is applied; a sum that it does not hold is an overflow."""

        class Half(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))

            def forward(self, inputs):
                return self.weight * inputs

        def loss_fn(output, target):
            loss = output.float().sum()
            return (loss, target.sum()) if per_token else loss

        network = Half()
        schedule = one_stage(network, loss_fn=loss_fn)
        schedule.scale_grads = scale_grads
        optimizer = torch.optim.Adam(network.parameters(), eps=1e-6, fused=fused)
        cell = MFTrainOneStepCell(
            schedule,
            optimizer,
            calculate_per_token_loss=per_token,
            accumulate_allreduce_grads_in_fp32=True,
        )

        output = cell(torch.full((2, 1), 40000.0).half(), target=torch.full((2, 1), 2.0))

        assert output.overflow == (expected is None)
        moments = [state["exp_avg"].item() for state in optimizer.state.values()]
        assert sum(moments) == pytest.approx((expected or 0.0) / 10, rel=1e-3)

    @pytest.mark.parametrize(
        ("make", "settings", "error", "message"),
        [
            (lambda: one_stage(loss_fn=None), {}, ValueError, "GPipe without `loss_fn`"),
            (
                one_stage,
                {"gradient_accumulation_steps": 2},
                ValueError,
                "must be 1 with a pipeline schedule, which accumulates its 2 micro-batches, got 2",
            ),
            (one_stage, {"sync_each_batch": True}, ValueError, "`sync_each_batch` must be False"),
            (one_stage, {"not_split": ["x"]}, ValueError, "`not_split` must be left out with a"),
            (
                lambda: one_stage(DistributedDataParallel(nn.Linear(2, 1))),
                {"accumulate_allreduce_grads_in_fp32": True},
                ValueError,
                "`accumulate_allreduce_grads_in_fp32` must be False with (a pipeline|torch 2.9)",
            ),
            (one_stage, {"calculate_per_token_loss": True}, TypeError, "`loss_fn` must return"),
            (
                lambda: one_stage(nn.Sequential(DistributedDataParallel(nn.Linear(2, 1)))),
                {},
                ValueError,
                "must wrap whole stages of a pipeline.* inside stage 0",
            ),
            (
                lambda: two_stages(
                    DistributedDataParallel(nn.Linear(2, 1)), ScheduleInterleavedZeroBubble
                ),
                {},
                ValueError,
                "stages of ScheduleInterleavedZeroBubble must not be wrapped",
            ),
            (
                lambda: two_stages(
                    nn.Linear(2, 1), ScheduleInterleaved1F1B, distributed.new_group([0])
                ),
                {},
                ValueError,
                "whose stages have the same process group, got several",
            ),
        ],
    )
    def test_refused_by_name(self, make, settings, error, message):
        """What would train wrong numbers is refused, at construction where that is possible."""
        schedule = make()

        with pytest.raises(error, match=message):
            MFTrainOneStepCell(schedule, sgd(schedule), **settings)(
                torch.ones(4, 2), target=torch.ones(4, 1)
            )

    @needs("torch", "2.10", "Tensor.grad_dtype")
    @pytest.mark.parametrize("in_float32", [True, False])
    def test_gradients_accumulate_in_float32(self, in_float32):
        """The mean of 1024 and 1 over two micro-batches is 512.5; bfloat16 has 512."""
        network = nn.Linear(2, 1, bias=False).bfloat16()
        schedule = one_stage(network, loss_fn=lambda output, target: (output * target).mean())
        cell = MFTrainOneStepCell(
            schedule,
            sgd(schedule),
            use_clip_grad=True,
            accumulate_allreduce_grads_in_fp32=in_float32,
        )
        inputs = torch.ones(2, 2).bfloat16()
        output = cell(inputs, target=torch.tensor([[1024.0], [1.0]]).bfloat16())

        assert output.global_norm == (512.5 if in_float32 else 512.0) * torch.tensor(2.0).sqrt()
        assert network.weight.grad_dtype == torch.bfloat16

    def test_a_schedule_without_an_order_of_its_own(self):
        """A schedule of the user's may define its step alone; its stage may be replicated."""

        class Own(ScheduleGPipe):
            def _get_pipeline_order(self):
                return None

        schedule = one_stage(DistributedDataParallel(nn.Linear(2, 1)), Own)
        cell = MFTrainOneStepCell(schedule, sgd(schedule))

        assert cell(torch.ones(4, 2), target=torch.ones(4, 1)).loss > 0

    def test_different_numbers_of_replicas(self, monkeypatch):
        """They are named with their ranks; a rank whose stages are frozen averages nothing."""
        accumulation = PipelineAccumulation(one_stage(), StepConfig())
        of_others = ["1", ""]
        monkeypatch.setattr(pipeline, "ranks_of", lambda _: [0, 1, 2])
        monkeypatch.setattr(pipeline, "gather_objects", lambda own, _: [own, *of_others])
        assert accumulation._unequal_replicas() is None

        of_others[0] = "2"
        assert accumulation._unequal_replicas() == (
            "pipeline: number of ranks that average a stage's gradients is 1 on rank 0 but 2 on "
            "rank 1; wrap all stages or none"
        )

    def test_an_accelerator_is_refused(self):
        """The library accelerate does not know pipelines."""
        schedule = one_stage()

        with pytest.raises(ValueError, match="`accelerator` must be None with a pipeline"):
            MFTrainOneStepCell(schedule, sgd(schedule), accelerator=new_accelerator())

    @OWN_MESSAGES
    def test_two_stages_on_one_rank(self):
        """Without other ranks, nothing is sent."""
        schedule = two_stages(nn.Linear(2, 1), ScheduleInterleaved1F1B)
        cell = MFTrainOneStepCell(schedule, sgd(schedule), use_clip_grad=True)
        output = cell(torch.ones(4, 2), target=torch.ones(4, 1))

        assert isinstance(cell._MFTrainOneStepCell__accumulate, PipelineAccumulation)
        assert not cell._MFTrainOneStepCell__accumulate.are_stages
        assert output.global_norm > 0


def rows(sizes):
    """Return tensors with these numbers of rows."""
    return {name: torch.ones(size, 1) for name, size in sizes.items()}
