"""Generate the reference pages of docs/reference from the code: `python -m ub_overlap.tools.docs`."""
