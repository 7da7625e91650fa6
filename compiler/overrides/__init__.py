"""What the user forces on sites.

rule.py       one rule
rules.py      options={"rules": [...]}
megatron.py   a tp_comm_overlap_cfg as rules
saved.py      options={"plan": ...}: plans that were saved
"""
