"""python -m benchmarks.peers: see `compare`."""

from benchmarks.peers.compare import main

if __name__ == "__main__":
    main()
