"""`python -m proxy`: the same command as `bench proxy`."""

from proxy.cli import main

if __name__ == "__main__":
    main()
