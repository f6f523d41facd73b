"""The processes that decode, their tasks, and the thread that assigns one to the other.

::

    load ─► job ─► dispatcher ─► decoder_pool ─► process ─┄ channel ┄─ worker ─► decoder
            tasks   one thread    slots of all     owner's    messages   sandboxed
                    assignment    kinds            side
"""
