"""All_reduces of few tokens, with residual and norm: single ops by bytes, and layers of decode."""
