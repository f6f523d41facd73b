"""Encoder outputs shared by engines, on one host and between hosts: an item that several get is encoded by one."""
