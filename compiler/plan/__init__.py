"""The records of a compilation: Plan, Decision, Reason and Strategy."""
