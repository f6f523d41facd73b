"""A scenario for tests that is right."""

GOOD = """
name = "pictures on one node"
seed = 3
duration_seconds = 100
warm_up_seconds = 10.0

[slo]
ttft_seconds = 2.0
itl_seconds = 0.1
attainment = 0.9

[workload]
kind = "servegen-mm-image"
rate = 4
sla = "interactive"

[cluster]
device = "a100-80gb"

[policy]
encode_ahead = true

[orchestration.balancing]
policy = "least-queue"

[[stages]]
name = "video"
kind = "video"
per_replica = 16

[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
replicas = 8

[[stages]]
name = "speech"
kind = "servers"
seconds = 0.5

[[failures]]
stage = "llm"
every_seconds = 60.0
"""
