"""The rendezvous store (torch TCPStore), hosted by the coordinator so that no rank's death takes it along."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def host_store(host: str, *, timeout_s: float = 60.0) -> tuple[TCPStore, int]:
    """Starts a TCPStore server on `host` (an address of this machine) and a free port. Blocking; imports torch.

    The store has no authentication of its own, and by itself listens on every interface: it is given a socket that
    is bound to the one address that the ranks use.

    Returns:
        (store, port); the server ends when the store is garbage collected.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, 0))
        listener.listen(1024)
        port: int = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            None,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    return store, port
