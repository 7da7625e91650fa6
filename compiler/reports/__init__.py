"""Reports of decisions and of their results at run time.

describe_site.py   the facts about a site that a Decision shows
history.py         the plans of this process
summary.py         a plan in one line, for logs
outlook.py         the predicted times of a decision
measured.py        the measured times of sites
timeline.py        the steps of sites, predicted and measured
what_next.py       the collectives that are still exposed, with the option to paste
report.py          Report and reports()
explain.py         ub_overlap.explain
"""
