"""One group of ranks on one device type: how the ranks meet, agree on plans, grow their memory and end."""
