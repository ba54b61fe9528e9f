"""What torch reports about a rank's device. A process of its own is asked."""

from harness.trace.record import Record


class DeviceFacts(Record, frozen=True, kw_only=True):
    """One CUDA device. `free_bytes` is what no process holds."""

    index: int
    name: str
    capability: tuple[int, int]  # (9, 0)
    total_bytes: int
    free_bytes: int


class TorchFacts(Record, frozen=True, kw_only=True):
    """The build of torch and its devices. `cuda` and `nccl` are versions; empty where torch was built without."""

    torch: str
    cuda: str = ""
    nccl: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    error: str = ""  # why torch shows no devices, in its own words
