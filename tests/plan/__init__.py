"""Rules, imported configurations, saved plans, plans made ahead, predictions in reports."""
