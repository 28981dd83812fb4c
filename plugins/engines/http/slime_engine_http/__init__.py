"""What every engine with servers shares: clients, supervision and updates of weights."""
