"""Trains CIFAR classifiers under plain PyTorch, DDP, FSDP2, tensor and pipeline parallelism, and DeepSpeed, and checks
each strategy against plain PyTorch."""
