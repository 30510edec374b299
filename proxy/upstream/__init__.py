"""The engine side: connections, pool, replicas, probe."""
