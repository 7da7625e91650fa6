"""The session of a process group on one device type: binding, agreement on plans, arena growth and shutdown."""
