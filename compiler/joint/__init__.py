"""Decisions on the joint graph: merged collectives, and what backward keeps of gathered tensors."""
