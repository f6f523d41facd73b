"""Does a bandit that was trained in the simulator steer prefill better than PID, AIMD and the adaptive control?"""
