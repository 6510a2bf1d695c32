"""This module runs `lowlat` as `python -m lowlat.cli`."""

from lowlat.cli import main

if __name__ == "__main__":
    main()
