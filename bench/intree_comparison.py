#!/usr/bin/env python3
"""Three stages of vLLM-Omni over its own Mori connector and over ours: what arrives.

    ./scripts/vllm_env.sh
    .venv-vllm/bin/python bench/intree_comparison.py

Both run the shipped qwen3_omni_moe_mori_intranode.yaml with host memory, through the host's chunk adapters,
in the stages of tests/vllm_omni/test_chunks.py. Mori itself needs AMD's runtime; in its place the in-tree
class gets a package `mori` that moves bytes through shared memory (--stand-in), so that what differs is the
connectors. docs/vllm-omni.md has the outcome and the reasons.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from connector_support import short_directory  # noqa: E402
from omni_support import FACADE, OURS, Cast, Host, host_missing  # noqa: E402

from mori_mp.pipeline.free_ports import PortBlock  # noqa: E402

# Whose connector; does each stage have its runner's connector too, as the host makes it; does the engine name
# each request's sender, as it does where stages have replicas.
CASES = (
    ("in-tree", True, False),
    ("in-tree", False, False),
    ("in-tree", False, True),
    ("mori-mp", True, False),
    ("mori-mp", True, True),
)


def add_stages(cast: Cast, case: tuple[str, bool, bool], options: argparse.Namespace) -> None:
    """Start the three stages of a case."""
    whose, runner, sender_info = case
    overrides: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    if whose == "in-tree":
        overrides["backend_type"] = "rdma"
        plan["stand_in"] = {"path": str(options.stand_in.resolve()), "pin": options.pin}
    for stage in (0, 1, 2):
        endpoint = {"*": {"host": "127.0.0.1", "zmq_port": cast.base_port + stage - 1}}
        cast.add(
            "chunks",
            {"MORI_MP_TAKEOVER": "0" if whose == "in-tree" else "1"},
            stage=stage,
            name=OURS,
            extra=cast.extra(**overrides),
            runner=runner,
            requests={f"req-{n}": n for n in range(options.requests)},
            chunks=options.chunks,
            sender_info=endpoint if sender_info and stage else {},
            seconds=options.seconds,
            closes=True,
            **plan,
        )


def run(cast: Cast, options: argparse.Namespace) -> dict[str, Any]:
    """Play a case to its end, whatever that is."""
    arrived: dict[int, int] = {}
    for word in ("ready", "done", "closed"):
        for number, stage in enumerate(cast.stages):
            said, value = stage.says(options.seconds + 30)
            if said != word:
                return {"arrived": arrived, "failure": f"stage {number} {said}: {value}"}
            if word == "done":
                arrived[number] = sum(value["got"].values()) if not value["wrong"] else -1
            elif word == "closed" and value["send_failures"]:
                reason = next(iter(value["send_failures"].values()))
                return {"arrived": arrived, "failure": f"stage {number}: {reason}"}
        for stage in cast.stages if word != "closed" else ():
            stage.answer()
    wanted = options.requests * options.chunks
    short = [f"stage {n} got {arrived[n]} of {wanted}" for n in (1, 2) if arrived[n] != wanted]
    return {"arrived": arrived, "failure": ", ".join(short)}


def main() -> int:
    """Run all cases; 0 if ours delivered everything and the in-tree class did not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stand-in", type=Path, default=FACADE["path"], help="folder with `mori`")
    parser.add_argument("--pin", default=FACADE["pin"], help="its stand-in for Tensor.pin_memory")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long a stage waits for its chunks")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    problem = host_missing()
    host = Host() if not problem else None
    if host is None or host.problem:
        print(problem or (host and host.problem), file=sys.stderr)
        return 2
    results = []
    wanted = options.requests * options.chunks
    print(f"{'connector':9} {'two per stage':13} {'sender named':12} {'stage 1':>8} {'stage 2':>8}  outcome")
    for case in CASES:
        began = time.monotonic()
        with short_directory() as runtime, PortBlock() as ports:
            cast = Cast(host, runtime, ports)
            try:
                add_stages(cast, case, options)
                result = run(cast, options)
            finally:
                cast.close()
        whose, runner, sender_info = case
        result |= {"connector": whose, "runner": runner, "sender_info": sender_info}
        result |= {"wanted": wanted, "seconds": round(time.monotonic() - began, 1)}
        results.append(result)
        counts = [f"{result['arrived'].get(n, 0)}/{wanted}" for n in (1, 2)]
        yes = ["yes" if flag else "no" for flag in (runner, sender_info)]
        outcome = result["failure"] or "all arrived"
        print(f"{whose:9} {yes[0]:13} {yes[1]:12} {counts[0]:>8} {counts[1]:>8}  {outcome}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(bool(r["failure"]) == (r["connector"] == "in-tree") for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
