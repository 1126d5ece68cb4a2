"""What a run needs beyond one process and one device: environment workers, vLLM, a memory plan."""
