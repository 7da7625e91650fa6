"""Programs that measure, predict and inspect: they import the compiler and the runtime, never the other way round."""
