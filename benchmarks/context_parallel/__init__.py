"""Attention layers whose sequence is spread over the ranks: gathered keys and values, ring and Ulysses."""
