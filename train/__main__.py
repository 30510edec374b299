"""`python -m train`: the same commands as `bench train`."""

from train.cli import main

main()
