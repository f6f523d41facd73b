"""Train the learning policies in the simulator.

settings.py   engines under workloads: to train on, and others to test on
train.py      a bandit that explores (linear Thompson sampling), and episodes, one after another
"""
