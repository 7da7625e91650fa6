"""What a site is worth. Until the device model comes: a plain size threshold (`threshold.py`)."""
