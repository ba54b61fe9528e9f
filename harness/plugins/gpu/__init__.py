"""Evidence that needs GPUs: which level of exactness they have, and how their kernels differ from the virtual ones."""
