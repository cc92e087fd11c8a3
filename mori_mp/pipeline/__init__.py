"""The main job: a vLLM-Omni shaped pipeline of stage processes that streams and checks real payloads."""
