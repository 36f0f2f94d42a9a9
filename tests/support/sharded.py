"""``eesd-distill`` sharded by FSDP 2 over processes on the CPU, for torchrun. By itself, accelerate shards on GPUs only;
here this one choice is made for it, and what then runs is its own code, torch's and the project's."""

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from eesd.distill import run
from eesd.distill.cli import main

made: list[Accelerator] = []


def sharding(cpu: bool) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    made.append(accelerator)
    return accelerator


run.Accelerator = sharding
main(standalone_mode=False)
assert isinstance(made[0]._models[0], FSDPModule) and made[0].is_fsdp2
