"""What a connector asks torch about a GPU. The tests put an emulated GPU in its place.

torch calls every GPU `cuda`, AMD's too, and numbers those that this process sees as the GPU runtime does. A
stream is the runtime's handle, as an int; 0 is the default stream of the current device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mori_mp.shared.errors import EngineUnavailable


def _stream_reader() -> Callable[[int], int]:
    """Return what tells the calling thread's current stream of a GPU.

    The kernels that torch generates read it so (`torch._inductor`), without a Stream object, which takes 12
    microseconds to make; that way in is private, so the public one stands behind it.
    """
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda number: int(torch.cuda.current_stream(number).cuda_stream))


_current_stream = _stream_reader()


class Accelerator:
    """torch's own view of the GPUs."""

    def number(self, device: str) -> int:
        """Return the number of a device such as `cuda` (the current one) or `cuda:1`.

        Raises EngineUnavailable when this process sees no such GPU.
        """
        if not torch.cuda.is_available():
            raise EngineUnavailable(
                f"memory_pool_device={device}: torch {torch.__version__} sees no GPU in this process; check "
                f"the driver, *_VISIBLE_DEVICES, and that this torch is a CUDA or ROCm build"
            )
        named = device.partition(":")[2]
        number = int(named) if named else torch.cuda.current_device()
        if number >= torch.cuda.device_count():
            raise EngineUnavailable(
                f"memory_pool_device={device}: this process sees {torch.cuda.device_count()} GPU(s); check "
                f"*_VISIBLE_DEVICES"
            )
        return number

    def allocate(self, size: int, number: int) -> torch.Tensor:
        """Return size bytes of a GPU's memory, 1-D uint8. Raises torch.OutOfMemoryError."""
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{number}")

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in GPU memory."""
        return tensor.is_cuda

    def stream(self, number: int) -> int:
        """Return the calling thread's current stream of a GPU."""
        return _current_stream(number)

    def begin_reading(self, source: torch.Tensor, number: int) -> bool:
        """Order what is enqueued on a GPU from now on behind what fills a tensor.

        True if that lies on another GPU: end_reading() must follow.
        """
        if source.get_device() == number:
            return False
        torch.cuda.current_stream(number).wait_stream(torch.cuda.current_stream(source.device))
        return True

    def end_reading(self, source: torch.Tensor, number: int) -> None:
        """Order what is enqueued on a tensor's own GPU from now on behind what has been on another."""
        # Its memory may be handed out again on its own stream.
        torch.cuda.current_stream(source.device).wait_stream(torch.cuda.current_stream(number))
