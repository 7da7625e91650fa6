"""What was decided and what came of it, for people and for programs.

describe.py   what a Decision shows of a site
history.py    the plans of this process
summary.py    a plan in one line
outlook.py    what the cost model says of a decision
measured.py   what calls of its sites took
timeline.py   their steps, predicted beside measured
report.py     all of it: Report, reports()
explain.py    ub_overlap.explain
"""
