"""Faults planted into trainings of many architectures, and what the monitor says about them.

- A *fault* (`faults`) is composed of what is changed, how, by how much (a size, drawn
  log-uniformly), for how long (a step or a few, for good, or growing by a factor), where (an
  element, a row, a tensor, a layer, everything), when in the step, and on which rank, micro-batch
  and row. What is changed, how and for how long make a *kind*: all combinations except those that
  written rules exclude.
- The *networks* are small ones of transformers and peft (`library_networks`) and in plain torch
  (`plain_networks`), with `judged_networks` for kinds that rules are judged on. A layer of each has
  a healthy mask with minus infinity, which the monitor must not take for a fault.
- The *ways* are six (`training`): a loop over the cell, an attached loop, `MFTrainer`, and
  `LoopMonitor` in a loop over the cell, in an attached one and in plain torch. Most train with
  AdamW, others with SGD, Adagrad, NAdam, RMSprop or Muon.
- The *twin* of a run (`twin`) is the same run without the fault. Until the fault, both are equal
  bit by bit. A fault is *not finite* if losses, gradients or weights become so. It is *visible* if
  the loss or the norm of a layer's gradients is farther than six robust deviations from the twin's,
  *weak* if it is not, and *without effect* if the numbers are the twin's. Only what happens while a
  record is in time counts.
- A record is *in time* up to the step after the fault; for what is read every ten steps, up to the
  next reading; and for a fault that lasts or grows, up to the first reading after 20 steps.
- A cause is *right* (`expectation`) if it leads the reader to the true place. A layer, rank,
  micro-batch or row that is not the fault's is *wrong*, and so is a layer if the fault is in none.
  A place left out, or the cause `unknown`, is neither. An episode before the fault, or in the twin,
  is a false alarm. Notes of the monitor count as records.
- The kinds are split (`split`) into those that rules are written on, and the *judged half*.
"""
