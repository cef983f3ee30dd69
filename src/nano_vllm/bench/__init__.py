"""What `nano-vllm bench` and the scripts in benchmarks/ measure: workloads, their runs, and what the machine would allow."""

GROUPS = ("latency", "prefill", "throughput", "queue", "shared", "scaling")  # of workloads, in the order of a table
