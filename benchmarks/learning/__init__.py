"""Train a bandit in the simulator to steer prefill, and compare it with PID, AIMD and the adaptive control.

settings.py    engines under workloads: to train on, and others to test on
train.py       a bandit that explores (linear Thompson sampling), and episodes, one after another
compare.py     controls on the same requests
"""
