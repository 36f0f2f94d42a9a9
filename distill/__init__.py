"""Self-distillation of an exit head (``eesd-distill``).

These are the modules in reading order. Each module imports only from the modules above it.

* ``options``: the options of a run and their checks.
* ``data``: token rows read from files, and the order in which batches use them.
* ``generate``: rows that the model generates itself.
* ``teacher``: hidden states and top-k targets of the frozen model, computed for each batch or
  cached on disk.
* ``losses``: losses per token, and the exit head as a training module.
* ``acceptance``: rounds and acceptance by draft depth, replayed from one parallel pass.
  ``eesd.distill.calibrate`` fits the calibration prior to them.
* ``metrics``: ``metrics.jsonl``.
* ``trainer``: training loop, checkpoints, exact resume.
* ``run``: one run, from its options to training and evaluation.
* ``cli``: the command.
"""
