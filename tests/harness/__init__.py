"""What tests share: pools of ranks, graph traces, comparisons."""
