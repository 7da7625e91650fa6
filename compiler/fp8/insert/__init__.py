"""Turn the 16-bit linears of a joint graph into scaled float8 matmuls."""
