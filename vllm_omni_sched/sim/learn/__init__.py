"""Train the learning policies in the simulator.

settings.py   engines under workloads: to train on, and others to test on
explore.py    a bandit that explores (linear Thompson sampling)
train.py      episodes, one after another
"""
