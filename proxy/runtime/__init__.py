"""The process: event loop, memory, file descriptors, logs."""
