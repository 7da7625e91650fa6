"""Output formats of a Diff: text, HTML, graphviz, model-explorer JSON."""
