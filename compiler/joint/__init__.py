"""Decisions on the joint graph: merged collectives, and whether backward keeps a gathered tensor or its shard."""
