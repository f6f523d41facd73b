"""Encoder outputs shared by the engines of a host: an item that several get is encoded by one."""
