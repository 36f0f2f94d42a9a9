"""``eesd-distill`` sharded by FSDP 2 over CPU processes, to be started by torchrun.

Accelerate shards only on GPUs. This program overrides that one choice; everything else runs unchanged.
"""

from unittest.mock import patch

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from eesd.distill import run
from eesd.distill.cli import main

accelerators: list[Accelerator] = []


def fsdp_accelerator(cpu: bool) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerators.append(accelerator)
    return accelerator


with patch.object(run, "Accelerator", fsdp_accelerator):
    main(standalone_mode=False)
assert isinstance(accelerators[0]._models[0], FSDPModule) and accelerators[0].is_fsdp2
