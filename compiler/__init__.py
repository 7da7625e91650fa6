"""Graph -> sites -> plan -> graph: the torch.compile backend. Never imports CUDA; talks to the runtime through its ops."""
