"""Graphs that the user traces without torch.compile: the entry, and what AOTAutograd does for graphs of the backend."""
