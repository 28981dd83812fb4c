"""Clients, supervision and weight updates that the engines with servers share."""
