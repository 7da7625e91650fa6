"""The kernel of fused collectives on one GPU, without a link."""
