"""The stock Trainer in fp16 on a CPU."""

import torch
from transformers import Trainer

__all__ = ["FP16_SCALE", "StockHalf"]

FP16_SCALE = 2.0**12


class StockHalf(Trainer):
    """Trainer with autocast and a gradient scaler on the CPU, where fp16 would have neither."""

    def create_accelerator_and_postprocess(self) -> None:
        """Give the accelerator autocast and a scaler."""
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=FP16_SCALE, growth_interval=3
        )
