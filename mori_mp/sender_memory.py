"""The memory of a link's sender, mapped here, and what we have posted to that sender.

All of it is that of one stage, which its epoch names; when another one serves the sender's port, it is let go
of as soon as nobody uses it any more.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from mori_mp.lent import LentPool
from mori_mp.lent_device import LentDevice
from mori_mp.posted import PostedSlots
from mori_mp.shared import wire
from mori_mp.shared.errors import EngineUnavailable, WireError
from mori_mp.shared.pool import Pool, PoolDescriptor

logger = logging.getLogger(__name__)


class SenderMemory:
    """See the module's docstring. Thread-safe.

    address names the sender in messages; welcome() returns its last Welcome; say_hello() tells it what is
    posted.
    """

    def __init__(
        self, address: str, welcome: Callable[[], wire.Welcome | None], say_hello: Callable[[], None]
    ) -> None:
        self._address = address
        self._welcome = welcome
        self._say_hello = say_hello
        self._lock = threading.RLock()  # a finalizer that meets a new sender comes here in the middle
        self._pool: tuple[str, LentPool] | None = None  # epoch, pool
        self._device: tuple[str, LentDevice | None] | None = None  # the same of its GPU pool
        self.posts: PostedSlots | None = None
        """What the sender may push into."""
        self._former_posts: deque[PostedSlots] = deque()  # those of former senders, still to be retired
        self._retired_posts: list[PostedSlots] = []
        self._retired_devices: list[LentDevice] = []
        self._closed = False

    def pool(self) -> LentPool:
        """Return the sender's pool, mapped. Raises EngineUnavailable when it is out of reach."""
        with self._lock:
            welcome = self._welcome()
            if welcome is None or self._closed:
                raise EngineUnavailable(
                    f"the pool of the sender at {self._address} is not to be had any more"
                )
            if self._pool is not None and self._pool[0] == welcome.epoch:
                return self._pool[1]
            self._retire_pool()
            lent = LentPool(Pool.open_peer(PoolDescriptor.unpack(welcome.mem_desc)))
            self._pool = welcome.epoch, lent
            return lent

    def device(self, borrow: Callable[[bytes], LentDevice]) -> LentDevice | None:
        """Return the sender's GPU pool, mapped by borrow(); None if out of reach, which is said once."""
        with self._lock:
            welcome = self._welcome()
            if self._device is not None and welcome is not None and self._device[0] == welcome.epoch:
                return self._device[1]
            self._retire_device()
            if welcome is None or self._closed or not welcome.device_desc:
                return None
            lent: LentDevice | None = None
            try:
                lent = borrow(welcome.device_desc)
            except (EngineUnavailable, WireError) as exc:
                logger.warning(
                    "GPU payloads of the sender at %s are written by its workers: its GPU pool cannot be "
                    "read from here: %s",
                    self._address,
                    exc,
                )
            self._device = welcome.epoch, lent
            return lent

    def posts_for(self, make: Callable[[LentDevice, str], PostedSlots]) -> PostedSlots | None:
        """Return what the sender may push into, made on first use for its epoch; None if it does not push.

        Not for handlers and finalizers.
        """
        self._retire_posts()
        with self._lock:
            welcome, device = self._welcome(), self._device
            if welcome is None or self._closed or not welcome.pushes or device is None:
                return None
            if self.posts is not None or device[0] != welcome.epoch or device[1] is None:
                return self.posts
            self.posts = posts = make(device[1], welcome.epoch)
        self._say_hello()
        return posts

    def _leave_posts(self) -> None:
        posts, self.posts = self.posts, None
        if posts is not None:
            self._former_posts.append(posts)

    def reclaim_posts(self) -> None:
        """Take back what can be of all that this sender, or a former one, may push into.

        Not for handlers and finalizers.
        """
        self._retire_posts()
        posts = self.posts
        if posts is not None:
            posts.reclaim()

    def _retire_posts(self) -> None:
        while self._former_posts:
            try:
                posts = self._former_posts.popleft()
            except IndexError:  # another thread has taken it
                return
            posts.retire()
            if not posts.is_over:
                self._retired_posts.append(posts)

    @property
    def late_copies(self) -> bool:
        """Tell whether a GPU copy into our pool may still be under way, once the link is closed."""
        self._retired_posts = [posts for posts in self._retired_posts if not posts.is_over]
        self._retired_devices = [device for device in self._retired_devices if device.busy]
        return bool(self._retired_posts or self._retired_devices)

    def _retire_pool(self) -> None:
        lent, self._pool = self._pool, None
        if lent is not None:
            lent[1].retire()

    def _retire_device(self) -> None:
        device, self._device = self._device, None
        if device is not None and device[1] is not None:
            device[1].retire()
            self._retired_devices = [one for one in (*self._retired_devices, device[1]) if one.busy]

    def sender_replaced(self) -> None:
        """Another stage serves the port. For handlers too."""
        self._leave_posts()
        with self._lock:  # what a stage that is gone has lent keeps its memory from being free
            self._retire_device()

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._closed = True
            self._leave_posts()
            self._retire_posts()
            self._retire_pool()
            self._retire_device()
