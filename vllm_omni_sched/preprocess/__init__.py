"""Preprocessing of pictures, audio and video in processes of their own, so that the front end never stalls.

::

    request ─► JobOrder ─► slot ─► working process: decode, HF processor ─► sealed memory file ─► tensors
               which next           forked once, replaced when it dies        no copy, no pickle
"""
