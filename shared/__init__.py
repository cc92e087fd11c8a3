"""What both sides of a process boundary agree on: messages, wire protocol, pool, topology, errors."""
