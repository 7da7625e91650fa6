"""Collectives that send each element once: repeats are made behind them, and sums over repeats in front of them."""
