"""Layers whose tokens are independent, computed in two halves: one exchanges its tokens while the other one computes.

    tokenwise.py       what a user declares
    in_halves.py       the forward of such a layer in halves
    choose_halves.py   whole or in halves: the predicted times of both forms
    trace_layer.py     the forward and backward graph of a layer alone, of which the times are predicted

Dynamo traces the form that is chosen. So both halves have sizes, counts and gradients of their own, like any traced code, and
windows/pair_exchanges.py starts the exchange of one half before the compute of the other.
"""
