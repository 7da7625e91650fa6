"""A Diff for people and for programs: text.py, html.py, dot.py, model_explorer.py."""
