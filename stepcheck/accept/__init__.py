"""`stepcheck accept`: trains small models under each strategy, and audits every step.

The trainings execute the parts of DeepSpeed, DistributedDataParallel and FSDP2 where errors have been found.
"""
