"""Many GPUs, many machines: batches of pictures handed out to workers of a Ray cluster.

batch_queue   which batch a worker gets next; retries, suspects and poisoned pictures
coordinator   the loop of the driver: workers, faults, stealing at the end
worker_pool   the port to the workers
program       the port to what a worker does with a batch
worker        a worker's own side: reads and writes in threads, draws in one
ray_pool      workers as Ray actors, one for each GPU
ray_graphs    graphs and leases in a Ray actor, for nodes that share no folder
ray_library   Ray itself, imported when it is needed
metrics       Prometheus metrics through Ray's own
"""
