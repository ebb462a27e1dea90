"""
FSDP on a CPU, for processes of the tests that `accelerate launch` started with an FSDP configuration. As a script it is
`mempo_trl.scripts.train` with it.

accelerate 1.15 makes an FSDP state for accelerators only, and without a word trains with DDP where the device is a CPU.
What it does after that works on gloo as well, so the state is set here.
"""

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from mempo_trl.scripts import train
from mempo_trl.scripts.arguments import parse_launched


_init = AcceleratorState.__init__


def _fsdp_init(self, *args, fsdp_plugin=None, **kwargs):
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
    if "fsdp_plugin" in self.__dict__:
        self.distributed_type = DistributedType.FSDP


def enable() -> None:
    """From here on, an accelerator on the CPU shards where its configuration says so."""
    AcceleratorState.__init__ = _fsdp_init


if __name__ == "__main__":
    enable()
    train.main(*parse_launched(train.make_parser()))
