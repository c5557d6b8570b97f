"""Keep an exponential moving average of weights; see `mfwrap.ExponentialMovingAverage`."""
