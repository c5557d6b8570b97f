"""An exponential moving average of the weights; `mfwrap.ExponentialMovingAverage` is public."""
