"""Clients, supervision and weight updates of inference servers, shared by the engines that have servers."""
