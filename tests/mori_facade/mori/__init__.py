"""Mori's Python API, as far as vllm-omni's in-tree connector uses it, over this project's shm engine.

With this package on the path the unmodified in-tree class runs without a GPU or an RDMA device, and its
descriptors are ours byte for byte: a memory descriptor is a packed `PoolDescriptor`, so our transfer workers
write into its pool and it writes into ours. Pools are memfds made by `mori.pinned`.

    cpp      configuration, descriptors, statuses
    io       IOEngine
    pinned   what stands in for torch.Tensor.pin_memory
"""
