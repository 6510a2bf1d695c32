"""References of a mixture of experts, and of the MXFP4 format."""
