"""How long an 80 ms frame of audio takes, as a realtime transcription session grows: real engine, stock and ours."""

FRAME_SECONDS = 0.080
FRAME_SAMPLES = 1280  # 80 ms at 16 kHz
