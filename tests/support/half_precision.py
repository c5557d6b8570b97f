"""Train with the stock Trainer in fp16 on a CPU."""

import torch
from transformers import Trainer

__all__ = ["FP16_SCALE", "StockHalf"]

FP16_SCALE = 2.0**12


class StockHalf(Trainer):
    """A stock Trainer that runs fp16 on a CPU with autocast and a gradient scaler.

    accelerate creates autocast and the scaler on CUDA only.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Give the accelerator autocast and a scaler."""
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=FP16_SCALE, growth_interval=3
        )
