"""`MFTrainer`: the Hugging Face Trainer with MindFormers' training step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BaseImageProcessor,
    DataCollator,
    EvalPrediction,
    FeatureExtractionMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from mfwrap.accelerate.setup import EMA
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import ScaleSense
from mfwrap.records.skipped_rows import SkipRows
from mfwrap.schedules.batch_growth import RampUp
from mfwrap.step.ranks.local_norms import CommunicationHook
from mfwrap.trainer.mixin import MFTrainerMixin
from mfwrap.trainer.rollback import Rollback
from mfwrap.trainer.row_losses import LossBy

if TYPE_CHECKING:
    import datasets


class MFTrainer(MFTrainerMixin, Trainer):
    """`transformers.Trainer` with MindFormers' training step.

    `MFTrainerMixin` describes the step's arguments (``step``, ``ema``, ``scale_sense``,
    ``communication_hook``, ``data_skip_steps``, ``skip_rows``, ``rollback``,
    ``rampup_batch_size``, ``eval_per_token_loss``, ``use_stateful_dataloader``, ``loss_by``,
    ``row_losses`` and ``async_save``) and what differs from the Trainer; the other arguments are
    the Trainer's.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> from mfwrap import ExponentialMovingAverage, StepConfig
        >>> from mfwrap.trainer import MFTrainer
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1))
        >>> tokens = torch.arange(8)
        >>> trainer = MFTrainer(
        ...     model,
        ...     TrainingArguments(
        ...         "run", max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True
        ...     ),
        ...     train_dataset=[{"input_ids": tokens, "labels": tokens}] * 16,
        ...     step=StepConfig(local_norm=True, local_norm_groups="layer"),
        ...     ema=lambda model: ExponentialMovingAverage(model, 0.99),
        ... )
        >>> result = trainer.train()  # doctest: +ELLIPSIS
        {...
        >>> trainer.attached.last_output.overflow
        tensor(False)
    """

    def __init__(  # noqa: PLR0917  (the Trainer's signature)
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: "Dataset[Any] | IterableDataset[Any] | datasets.Dataset | None" = None,
        eval_dataset: "Dataset[Any] | dict[str, Dataset[Any]] | datasets.Dataset | None" = None,
        processing_class: PreTrainedTokenizerBase
        | BaseImageProcessor
        | FeatureExtractionMixin
        | ProcessorMixin
        | None = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[
            torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None
        ] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        step: StepConfig | None = None,
        ema: EMA | None = None,
        scale_sense: ScaleSense | None = None,
        communication_hook: CommunicationHook | None = None,
        data_skip_steps: int | None = None,
        skip_rows: SkipRows | None = None,
        rollback: Rollback | None = None,
        rampup_batch_size: RampUp | None = None,
        eval_per_token_loss: bool = False,
        use_stateful_dataloader: bool = False,
        loss_by: LossBy | None = None,
        row_losses: bool = False,
        async_save: bool = False,
    ) -> None:
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            model_init,
            compute_loss_func,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
            step=step,
            ema=ema,
            scale_sense=scale_sense,
            communication_hook=communication_hook,
            data_skip_steps=data_skip_steps,
            skip_rows=skip_rows,
            rollback=rollback,
            rampup_batch_size=rampup_batch_size,
            eval_per_token_loss=eval_per_token_loss,
            use_stateful_dataloader=use_stateful_dataloader,
            loss_by=loss_by,
            row_losses=row_losses,
            async_save=async_save,
        )
