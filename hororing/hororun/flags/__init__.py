"""The flags of hororun, and lists of hosts: from texts to checked values. Starts nothing."""
