"""Strategies that the user requests for sites: options={"overrides": ...}.

override_set.py        all requests; the forms of the option
rule.py                one rule
requested_strategy.py  the texts of strategies
megatron.py            a tp_comm_overlap_cfg as rules
saved_plan.py          saved plans
option_file.py         JSON and YAML files
unmatched_patterns.py  warnings for patterns and rules that match no site
"""
