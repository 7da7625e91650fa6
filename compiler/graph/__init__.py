"""Facts about FX graphs that every pass needs: ATen effects, symbolic sizes, matmuls, emitted nodes, source locations."""
