"""mori-mp inside vLLM-Omni: the plugin that makes the host create our connector."""
