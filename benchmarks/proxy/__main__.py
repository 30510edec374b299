"""python -m benchmarks.proxy: see `compare`."""

from benchmarks.proxy.compare import main

if __name__ == "__main__":
    main()
