"""Small faults of the product, and a program that shows which tests notice each. Run by hand:

    python -m tests.mutations list
    python -m tests.mutations run [NAME ...] [--whole]

NAME is a name, a pattern or an area. Nothing but a temporary folder is changed (overlay.py).
"""
