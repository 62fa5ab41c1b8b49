"""One mechanism a file, such as the mesh, FSDP, tensor parallelism or recompute. None knows which model it gets."""
