"""cifar-zero doctor: checks of a machine, and of the nodes of a cluster."""
