"""The memory of a connector: the host pool, and the GPU pool beside it where there is to be one.

What moves them: a connector with a GPU pool runs the engine of its choice over that, and `shm` over the host
pool; one without runs the engine of its choice over the host pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mori_mp.backend import engine_options
from mori_mp.config import ConnectorConfig
from mori_mp.device_pool import DevicePool
from mori_mp.shared.pool import Pool
from mori_mp.slots import PoolSlots
from mori_mp.workers import engines
from mori_mp.workers.engines.base import Passive


class Pools:
    """See the module's docstring. Thread-safe.

    Raises PoolUnbacked, EngineUnavailable, ConfigError.
    """

    def __init__(self, settings: ConnectorConfig, engine: str, label: str) -> None:
        """engine: the one chosen; label: names the host pool's file, for the operator."""
        self._settings = settings
        on_gpu = settings.memory_pool_device != "cpu"
        self.device_engine = engine if on_gpu else ""
        self.host_engine = "shm" if on_gpu else engine
        self.options = engine_options(settings)
        size = settings.host_pool_size if on_gpu else settings.memory_pool_size
        self.host = Pool.create(size, label, settings.memory_pool_size if on_gpu else 0)
        self.slots = PoolSlots(self.host)
        self.device: DevicePool | None = None
        self._making = threading.Lock()
        self.passive = Passive(b"", b"")
        if settings.role != "sender" or self.host_engine == "shm":  # others need no engine to send
            self.passive = engines.receive(self.host_engine, self.host, self.options)

    def ensure_device(self, introduce: Callable[[DevicePool], None]) -> None:
        """Make the GPU pool once, if there is to be one, and introduce it to those that use it.

        It takes GPU memory and, in this process, a GPU context. Raises EngineUnavailable, ConfigError.
        """
        if not self.device_engine or self.device is not None:
            return
        with self._making:
            if self.device is None:
                size, where = self._settings.memory_pool_size, self._settings.memory_pool_device
                pool = DevicePool(size, where, self.device_engine, self.options)
                introduce(pool)
                self.device = pool

    def lend_device(self) -> bytes:
        """Return the packed descriptor of the GPU pool for workers; b"" if there is none."""
        return self.device.lend() if self.device is not None else b""

    def close(self, device_in_use: str) -> None:
        """Let go of everything; memory goes when the last buffer in use does.

        device_in_use: why others may still use the GPU pool, which is then kept; "" if they cannot.
        """
        self.passive.close()
        self.host.close()
        if self.device is not None:
            self.device.close(device_in_use)
