"""An exponential moving average of the weights."""

from mfwrap.average.ema import ExponentialMovingAverage

__all__ = ["ExponentialMovingAverage"]
