"""`python -m lowlat.cli` is `lowlat`."""

from lowlat.cli import main

if __name__ == "__main__":
    main()
