"""Text output: tables that fit a width, and what the terminal shows. Imports no torch."""
