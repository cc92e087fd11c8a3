"""What runs in its own process: the control process, the transfer workers and their engines."""
