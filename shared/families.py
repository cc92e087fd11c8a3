"""vLLM-Omni's own metric families of transfers between stages, which an operator's dashboards may know.

They keep vLLM-Omni's names, units and bucket bounds, so that one query covers both. What they measure here:

    vllm_omni:transfer_size_bytes    stage's control process: size of each published payload
    vllm_omni:transfer_tx_s          sending stage: put() from its call until the payload is handed over
    vllm_omni:transfer_rx_s          receiving stage: from a payload known to be there until usable
    vllm_omni:transfer_in_flight_s   sender's control process: from publication until the receiver pulls, or
                                     settles what it got without a pull

They are counted only where they are served, that is with `prometheus_port`.
"""

from __future__ import annotations

from mori_mp.shared.histogram import Bounded

SIZE_BYTES = "vllm_omni:transfer_size_bytes"
TX_SECONDS = "vllm_omni:transfer_tx_s"
RX_SECONDS = "vllm_omni:transfer_rx_s"
IN_FLIGHT_SECONDS = "vllm_omni:transfer_in_flight_s"

SECONDS_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
BYTES_BOUNDS = tuple(float(1024 * 4**step) for step in range(10))  # 1 KiB to 256 MiB

BOUNDS: dict[str, tuple[float, ...]] = {
    SIZE_BYTES: BYTES_BOUNDS,
    TX_SECONDS: SECONDS_BOUNDS,
    RX_SECONDS: SECONDS_BOUNDS,
    IN_FLIGHT_SECONDS: SECONDS_BOUNDS,
}


def counted(name: str) -> Bounded:
    """Make an empty histogram of one family."""
    return Bounded(BOUNDS[name])
