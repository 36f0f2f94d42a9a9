"""Self-distillation of an exit head (``eesd-distill``).

These are the modules in reading order. Each module imports only from the modules above it.

* ``options`` has the options of a run and checks them.
* ``data`` reads token rows from files, and has the order in which batches use them.
* ``generate`` lets the model write rows.
* ``teacher`` computes hidden states and top-k targets of the frozen model for each batch, or caches
  them on disk.
* ``losses`` has the losses per token, and the exit head as a training module.
* ``acceptance`` replays rounds from one parallel pass, and measures acceptance by draft depth.
  ``eesd.distill.calibrate`` fits the calibration prior to these rounds.
* ``metrics`` writes ``metrics.jsonl``.
* ``trainer`` has the training loop and the checkpoints, from which a run resumes exactly.
* ``run`` performs one run, from its options to training and evaluation.
* ``cli`` is the command.
"""
