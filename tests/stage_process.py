"""A stage with one connector, as a program: JSON lines in (commands) and out (answers).

    {"op": "put", "key": ..., "size": ..., "seed": ...}   -> put()'s result, of pattern(size, seed)
    {"op": "hold", "key": ..., "metadata": ...}           -> size of a payload that is got and kept
    {"op": "digest"}                                      -> SHA-256 of everything that is held
    {"op": "release"}                                     -> number of payloads let go
    {"op": "health"}                                      -> health()
    {"op": "fork"}                                        -> process id of a forked child, which only waits
    {"op": "close"}                                       -> seconds that it took

Its first line says who it is. It ends with its standard input.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

from connector_support import pattern

from mori_mp import MoriTransferEngineConnector


def say(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    connector = MoriTransferEngineConnector(json.loads(sys.argv[1]))
    say({"pid": os.getpid(), "port": connector.zmq_port})
    held: list[Any] = []
    for line in sys.stdin:
        command = json.loads(line)
        op = command["op"]
        if op == "put":
            say(connector.put("0", "1", command["key"], pattern(command["size"], command["seed"])))
        elif op == "hold":
            found = connector.get_with_deadline(
                "0", "1", command["key"], command.get("metadata"), deadline=time.monotonic() + 10
            )
            held.append(found[0] if found else None)
            say(found[1] if found else None)
        elif op == "digest":
            say([hashlib.sha256(buffer.to_bytes()).hexdigest() for buffer in held])
        elif op == "release":
            for buffer in held:
                buffer.release()
            say(len(held))
            held.clear()
        elif op == "fork":
            child = os.fork()
            if child == 0:
                signal.pause()
            say(child)
        elif op == "health":
            say(connector.health())
        else:
            began = time.monotonic()
            connector.close()
            say(time.monotonic() - began)


if __name__ == "__main__":
    main()
