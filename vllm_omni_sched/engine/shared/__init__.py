"""Encoder outputs shared by the engines of one host: an item that several replicas get is encoded by one of them."""
