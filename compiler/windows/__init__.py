"""Split collectives: where each starts and finishes, on one budget of the link and of memory (docs/explanation/windows.md)."""
